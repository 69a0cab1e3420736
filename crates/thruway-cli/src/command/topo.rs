//! `thruway topo`: what lies where, and which GPU and which mount belong together.

mod svg;
mod text;

use std::path::Path;

use thruway::doctor::facts::{Facts, Kind as FactKind, Question, Unseen};
use thruway::doctor::topology::{Kind, LinkView, Part, Topology};
use thruway::{Error, ErrorKind, Result};

use crate::args::TopoArgs;
use crate::escape::safe_path;
use crate::facts::{absolute, captured, chosen, live, write_new};
use crate::output::{Outcome, Output};
use crate::stop;

pub(super) fn run(args: &TopoArgs, output: &Output) -> Result<Outcome> {
    let topology = stop::at_once(|| examined(args))?;
    for line in text::lines(&topology) {
        output.line(line)?;
    }
    if let Some(file) = &args.svg {
        write_new(file, &svg::draw(&topology))?;
        output.remark(format!("wrote {}", safe_path(file)));
    }
    output.object(&topology)?;
    Ok(Outcome::Fine)
}

fn examined(args: &TopoArgs) -> Result<Topology> {
    Ok(match &args.from {
        Some(from) => {
            let (facts, captured) = captured(from)?;
            // Without a PATH a packed machine is drawn with all its mounts.
            let captured = if from.is_dir() { Vec::new() } else { captured };
            Topology::examine(facts.as_ref(), &chosen(from, &args.paths, captured)?)
        }
        None => {
            let (live, paths) = (live(), absolute(&args.paths)?);
            paths.iter().try_for_each(|path| ensure_there(&live, path))?;
            Topology::examine(&live, &paths)
        }
    })
}

/// Refuses a place that is not there. One that does not answer may be.
fn ensure_there(facts: &dyn Facts, path: &str) -> Result<()> {
    match facts.look(&Question::new(FactKind::Place, path)) {
        Err(Unseen::Absent) => {
            let error = Error::new(ErrorKind::NotFound, "there is nothing of this name").with_file(Path::new(path));
            Err(error.with_hint("name a file or a directory on the storage in question"))
        }
        _ => Ok(()),
    }
}

/// The parts that are drawn. A port with one thing behind it says no more than that thing, and is left out; not so the upper
/// end of a switch whose link is narrower than it could be, which is narrow for what lies behind it.
fn drawn<'a>(parts: &'a [Part], below_bridge: bool, out: &mut Vec<&'a Part>) {
    for part in parts {
        let is_bridge = matches!(part.kind, Kind::Port | Kind::Switch);
        let is_narrow = part.link.as_ref().is_some_and(|link| link.is_below);
        let leads_on = part.parts.iter().all(|below| matches!(below.kind, Kind::Port | Kind::Switch));
        if is_bridge && part.parts.len() <= 1 && !(is_narrow && below_bridge && leads_on) {
            drawn(&part.parts, true, out);
        } else {
            out.push(part);
        }
    }
}

/// The word for a kind of part.
fn word(kind: Kind) -> &'static str {
    match kind {
        Kind::Port => "port",
        Kind::Switch => "switch",
        Kind::Gpu => "GPU",
        Kind::Nvme => "NVMe",
        Kind::Drive => "drive",
        Kind::Network => "network",
    }
}

/// A link in words.
fn link(link: &LinkView) -> String {
    let rate = link.gb_per_s.map(|rate| format!(" {rate:.1} GB/s")).unwrap_or_default();
    let most = match (&link.most, link.is_below) {
        (Some(most), true) => format!(", BELOW {most}"),
        (Some(most), false) => format!(", up to {most} under load"),
        _ => String::new(),
    };
    format!("{}{rate}{most}", link.now)
}
