//! The picture as SVG: a frame for each NUMA node, a box for each part, and lines from what lies above to what lies below. A
//! link below what it could be is drawn in red. No scripts, no fonts from elsewhere: it opens wherever pictures do.

use thruway::doctor::topology::{Kind, Part, Topology};

use super::drawn;
use super::text::{BEST_GPU, BEST_PLACE, heading, words};
use crate::escape::safe;

/// Sizes in pixels. A character of the fixed-width font at 13 pixels is 7.8 wide; a little more stays free.
const CHARACTER: usize = 8;
const LINE: usize = 30;
const BOX: usize = 22;
const STEP: usize = 28;
const MARGIN: usize = 16;

/// One box, placed.
struct Placed {
    text: String,
    colour: &'static str,
    is_below: bool,
    depth: usize,
    row: usize,
    /// The row of what lies above it.
    above: Option<usize>,
}

/// The whole picture.
pub(super) fn draw(topology: &Topology) -> String {
    let mut frames: Vec<(String, Vec<Placed>)> = Vec::new();
    for node in &topology.nodes {
        let mut placed = Vec::new();
        for root in &node.roots {
            let row = placed.len();
            placed.push(Placed { text: safe(&root.name), colour: "#e8e8e8", is_below: false, depth: 0, row, above: None });
            place(&root.parts, false, 1, row, &mut placed);
        }
        frames.push((heading(node), placed));
    }
    if !topology.elsewhere.is_empty() {
        let mut placed = Vec::new();
        for part in &topology.elsewhere {
            let row = placed.len();
            placed.push(boxed(part, 0, row, None));
        }
        frames.push(("not on a PCI bus that shows".to_owned(), placed));
    }
    let advice = advice(topology);
    let width = frames.iter().map(frame_width).chain(advice.iter().map(|line| text_width(line) + 2 * MARGIN));
    let width = width.max().unwrap_or(0).max(320) + 2 * MARGIN;
    let mut body = String::new();
    let mut y = MARGIN;
    for (title, placed) in &frames {
        y = frame(&mut body, title, placed, y, width - 2 * MARGIN);
    }
    for line in &advice {
        text(&mut body, (MARGIN, y + BOX - 7), line, "#222222");
        y += BOX;
    }
    let height = y + MARGIN;
    format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         viewBox=\"0 0 {width} {height}\" font-family=\"monospace\" font-size=\"13\">\n<title>GPUs, drives and network cards of this \
         machine</title>\n<rect width=\"{width}\" height=\"{height}\" fill=\"#ffffff\"/>\n{body}</svg>\n"
    )
}

fn place(parts: &[Part], below_bridge: bool, depth: usize, above: usize, placed: &mut Vec<Placed>) {
    let mut shown = Vec::new();
    drawn(parts, below_bridge, &mut shown);
    for part in shown {
        let row = placed.len();
        placed.push(boxed(part, depth, row, Some(above)));
        place(&part.parts, true, depth + 1, row, placed);
    }
}

fn boxed(part: &Part, depth: usize, row: usize, above: Option<usize>) -> Placed {
    let colour = match part.kind {
        Kind::Port | Kind::Switch => "#f3f3f3",
        Kind::Gpu => "#d9efc2",
        Kind::Nvme | Kind::Drive => "#cfe3f7",
        Kind::Network => "#f9e3c4",
    };
    let is_below = part.link.as_ref().is_some_and(|link| link.is_below);
    Placed { text: words(part).join("  "), colour, is_below, depth, row, above }
}

/// Draws a frame at `y`, and gives where the next may begin.
fn frame(body: &mut String, title: &str, placed: &[Placed], y: usize, width: usize) -> usize {
    let height = LINE * (placed.len() + 1) + MARGIN / 2;
    body.push_str(&format!(
        "<rect x=\"{MARGIN}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" rx=\"6\" fill=\"none\" stroke=\"#999999\"/>\n"
    ));
    text(body, (2 * MARGIN, y + LINE - 10), title, "#222222");
    let left = |depth: usize| 2 * MARGIN + depth * STEP;
    let top = |row: usize| y + LINE * (row + 1);
    let depth_of = |row: usize| placed.get(row).map_or(0, |placed| placed.depth);
    for part in placed {
        let colour = if part.is_below { "#c00000" } else { "#777777" };
        if let Some(above) = part.above {
            // Down from the box above, then to the right; only the latter is this part's own.
            let (x, from, to) = (left(depth_of(above)) + STEP / 2, top(above) + BOX, top(part.row) + BOX / 2);
            let end = left(part.depth);
            body.push_str(&format!("<path d=\"M{x} {from} V{to}\" fill=\"none\" stroke=\"#777777\"/>\n"));
            body.push_str(&format!("<path d=\"M{x} {to} H{end}\" fill=\"none\" stroke=\"{colour}\"/>\n"));
        }
        let (x, top, wide) = (left(part.depth), top(part.row), text_width(&part.text) + MARGIN);
        let fill = part.colour;
        body.push_str(&format!(
            "<rect x=\"{x}\" y=\"{top}\" width=\"{wide}\" height=\"{BOX}\" rx=\"4\" fill=\"{fill}\" stroke=\"{colour}\"/>\n"
        ));
        text(body, (x + MARGIN / 2, top + BOX - 7), &part.text, if part.is_below { "#c00000" } else { "#000000" });
    }
    y + height + MARGIN
}

/// The lines below the frames.
fn advice(topology: &Topology) -> Vec<String> {
    let mounts = topology.mounts.iter().map(|mount| {
        let gpu = mount.gpu.as_deref().unwrap_or("no GPU");
        safe(&format!("{} ({}): {gpu}: {}", mount.path, mount.storage, mount.reason))
    });
    let gpus = topology.gpus.iter().map(|gpu| {
        let path = gpu.path.as_deref().unwrap_or("no place");
        safe(&format!("{}: {path}: {}", gpu.gpu, gpu.reason))
    });
    let under = |title: &str, lines: Vec<String>| {
        let title = (!lines.is_empty()).then(|| title.to_owned());
        title.into_iter().chain(lines.into_iter().map(|line| format!("  {line}"))).collect::<Vec<String>>()
    };
    let mut lines = under(BEST_GPU, mounts.collect());
    lines.extend(under(BEST_PLACE, gpus.collect()));
    lines
}

fn frame_width((title, placed): &(String, Vec<Placed>)) -> usize {
    let widths = placed.iter().map(|placed| placed.depth * STEP + text_width(&placed.text) + MARGIN);
    widths.chain([text_width(title)]).max().unwrap_or(0) + 2 * MARGIN
}

fn text_width(text: &str) -> usize {
    text.chars().count() * CHARACTER
}

fn text(body: &mut String, (x, y): (usize, usize), text: &str, colour: &str) {
    let text = escaped(text);
    body.push_str(&format!("<text x=\"{x}\" y=\"{y}\" fill=\"{colour}\" xml:space=\"preserve\">{text}</text>\n"));
}

/// Text for XML. What no XML may hold (control characters) has been made visible before; two code points that are no
/// characters are left.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\u{fffe}' | '\u{ffff}' => out.push('\u{fffd}'),
            c if c.is_control() => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_that_would_end_a_picture_does_not() {
        assert_eq!(escaped("a<b>&\"\u{1}\u{ffff}é"), "a&lt;b&gt;&amp;&quot;\u{fffd}\u{fffd}é");
    }
}
