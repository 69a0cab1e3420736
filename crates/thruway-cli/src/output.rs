//! What the user sees: human text or JSON on standard output, errors and progress on standard error.

use std::cell::{Cell, RefCell};
use std::ffi::OsString;
use std::fmt::Display;
use std::io::{BufWriter, ErrorKind as IoKind, IsTerminal, Stdout, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use serde_json::{Map, Value, json};
use thruway::transfer::{FileReceipt, Part, Progress};
use thruway::{Error, Receipt, Result};

use crate::escape::{safe, safe_json, safe_lines, safe_path};

/// All is well.
const FINE_STATUS: u8 = 0;
/// It failed, or a check found a fault.
const FAILED_STATUS: u8 = 1;
/// The command line made no sense.
const USAGE_STATUS: u8 = 2;
/// It works, by a slower path than the machine could have.
const SLOWER_STATUS: u8 = 3;
/// Work that is done sooner shows no bar.
const BAR_AFTER: Duration = Duration::from_millis(500);

/// How a command that did its work ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// All is well.
    Fine,
    /// A check found a fault.
    Fault,
    /// A check found a slower path.
    Slower,
}

/// Standard output, in one of two forms. When its reader is gone, what is written goes nowhere: nobody is left to care,
/// and the exit status still tells what was found.
#[derive(Debug)]
pub(crate) struct Output {
    json: bool,
    closed: Cell<bool>,
    stdout: RefCell<BufWriter<Stdout>>,
}

impl Output {
    /// Standard output in the form that was asked for.
    pub(crate) fn new(json: bool) -> Self {
        Self { json, closed: Cell::new(false), stdout: RefCell::new(BufWriter::new(std::io::stdout())) }
    }

    /// Whether JSON was asked for.
    pub(crate) fn is_json(&self) -> bool {
        self.json
    }

    /// A line for people; nothing if JSON was asked for. The caller has made it safe.
    pub(crate) fn line(&self, line: impl Display) -> Result<()> {
        if self.json { Ok(()) } else { self.write(&format!("{line}\n")) }
    }

    /// The one object of a command; nothing if JSON was not asked for.
    pub(crate) fn object(&self, object: &impl Serialize) -> Result<()> {
        if !self.json {
            return Ok(());
        }
        let text = serde_json::to_string(object).map_err(|error| Error::from_io("cannot write JSON", error.into()))?;
        self.write(&format!("{}\n", safe_json(&text)))
    }

    /// Shows what was written so far.
    pub(crate) fn flush(&self) -> Result<()> {
        let result = self.stdout.borrow_mut().flush();
        self.settle(result)
    }

    fn write(&self, text: &str) -> Result<()> {
        if self.closed.get() {
            return Ok(());
        }
        let result = self.stdout.borrow_mut().write_all(text.as_bytes());
        self.settle(result)
    }

    fn settle(&self, result: std::io::Result<()>) -> Result<()> {
        match result {
            Err(error) if error.kind() == IoKind::BrokenPipe => self.closed.set(true),
            Err(error) if !self.closed.get() => {
                self.closed.set(true);
                return Err(Error::from_io("cannot write the output", error));
            }
            _ => {}
        }
        Ok(())
    }

    /// A warning on standard error, whatever the form.
    pub(crate) fn warn(&self, line: impl Display) {
        complain(&format!("warning: {line}\n"));
    }

    /// A line on standard error, for people; JSON says the same in its own way.
    pub(crate) fn remark(&self, line: impl Display) {
        if !self.json {
            complain(&format!("{line}\n"));
        }
    }

    /// A bar for work of so many bytes, where somebody is there to see it.
    pub(crate) fn bar(&self, label: &'static str, bytes: u64) -> Bar {
        if self.json || !std::io::stderr().is_terminal() {
            return Bar(None);
        }
        let bar = ProgressBar::with_draw_target(Some(bytes), ProgressDrawTarget::hidden());
        let template = "{msg} {bar:30} {decimal_bytes} of {decimal_total_bytes} {decimal_bytes_per_sec}";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        bar.set_message(label);
        Bar(Some(bar))
    }

    /// Prints how the command ended, and gives the exit status for it.
    pub(crate) fn finish(&self, result: Result<Outcome>) -> u8 {
        let result = result.and_then(|outcome| self.flush().map(|()| outcome));
        match result {
            Ok(Outcome::Fine) => FINE_STATUS,
            Ok(Outcome::Fault) => FAILED_STATUS,
            Ok(Outcome::Slower) => SLOWER_STATUS,
            Err(error) => {
                self.report(&error);
                let stopped = crate::stop::cancel().is_cancelled();
                if stopped { crate::stop::STOPPED_STATUS } else { FAILED_STATUS }
            }
        }
    }

    fn report(&self, error: &Error) {
        let hint = error.hint().map(|hint| format!("hint: {}\n", safe(hint)));
        // A failure to report a failure has nobody left to hear it.
        drop(self.object(&error_object(error)).and_then(|()| self.flush()));
        complain(&format!("error: {}\n{}", safe(&error.to_string()), hint.unwrap_or_default()));
    }
}

/// A progress bar, or nothing. Cleared when dropped.
#[derive(Debug)]
pub(crate) struct Bar(Option<ProgressBar>);

impl Bar {
    /// What tells the bar how far a transfer is; `None` where nobody looks.
    pub(crate) fn progress(&self) -> Option<Progress> {
        let bar = self.0.clone()?;
        let (begun, shown) = (Instant::now(), AtomicBool::new(false));
        Some(Arc::new(move |bytes| {
            bar.set_position(bytes);
            if begun.elapsed() > BAR_AFTER && !shown.swap(true, Ordering::Relaxed) {
                bar.set_draw_target(ProgressDrawTarget::stderr());
            }
        }))
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        if let Some(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}

/// Prints clap's answer: help and version on standard output, a mistake on standard error.
pub(crate) fn report_usage(usage: &clap::Error, arguments: &[OsString]) -> u8 {
    if !usage.use_stderr() {
        // The reader may be gone; then nobody misses it.
        drop(usage.print());
        return FINE_STATUS;
    }
    let text = safe_lines(&usage.render().to_string());
    let output = Output::new(crate::args::wants_json(arguments.iter().cloned()));
    let message = text.trim().trim_start_matches("error: ").to_owned();
    let object = json!({"error": {"kind": "usage", "message": message, "context": {}, "hint": "try `thruway --help`"}});
    drop(output.object(&object).and_then(|()| output.flush()));
    complain(&text);
    USAGE_STATUS
}

fn complain(text: &str) {
    // There is no third place to complain to.
    drop(std::io::stderr().write_all(text.as_bytes()));
}

fn error_object(error: &Error) -> Value {
    let context: Map<String, Value> = error.contexts().map(|(key, value)| (key.to_owned(), value.into())).collect();
    let source = std::error::Error::source(error).map(|source| format!(": {source}"));
    let message = format!("{}{}", error.message(), source.unwrap_or_default());
    json!({"error": {"kind": error.kind().name(), "message": message, "context": context, "hint": error.hint()}})
}

/// What a receipt says of files.
pub(crate) fn files_object(files: &[FileReceipt]) -> Vec<Value> {
    let part = |part: &Part| json!({"path": part.path.as_str(), "engine": part.engine.as_str(), "bytes": part.bytes, "reason": &*part.reason});
    let file = |file: &FileReceipt| {
        let parts: Vec<Value> = file.parts.iter().map(part).collect();
        json!({"file": file.file.to_string_lossy(), "bytes": file.bytes, "parts": parts})
    };
    files.iter().map(file).collect()
}

/// The fields of a receipt, to stand in an object of their own or among a command's.
pub(crate) fn receipt_fields(receipt: &Receipt) -> Map<String, Value> {
    let fields = json!({
        "bytes": receipt.bytes,
        "seconds": receipt.seconds,
        "gb_per_s": receipt.gb_per_s(),
        "cpu_seconds": receipt.cpu_seconds,
        "retries": receipt.retries,
        "files": files_object(&receipt.files),
    });
    fields.as_object().cloned().unwrap_or_default()
}

/// The notes of a model on standard error, for people.
pub(crate) fn remark_notes(output: &Output, path: &std::path::Path, notes: &[String]) {
    for note in notes {
        output.remark(format!("note: {}: {}", safe_path(path), safe(note)));
    }
}

/// Decimal gigabytes a second; 0 where no time passed.
pub(crate) fn gb_per_s(bytes: u64, seconds: f64) -> f64 {
    if seconds > 0.0 { bytes as f64 / seconds / 1e9 } else { 0.0 }
}

/// `1 tensor`, `2 tensors`.
pub(crate) fn counted(count: usize, noun: &str) -> String {
    if count == 1 { format!("1 {noun}") } else { format!("{count} {noun}s") }
}

/// Lines with aligned columns. Columns in `right` are flushed right.
pub(crate) fn table(rows: &[Vec<String>], right: &[usize]) -> Vec<String> {
    const WIDTH_MAX: usize = 72;
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count());
        cells.max().unwrap_or(0).min(WIDTH_MAX)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let line = |row: &Vec<String>| {
        let cells = row.iter().enumerate().map(|(column, cell)| {
            let width = widths[column];
            if right.contains(&column) { format!("{cell:>width$}") } else { format!("{cell:<width$}") }
        });
        cells.collect::<Vec<String>>().join("  ").trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_aligned() {
        let rows = [vec!["a".to_owned(), "10".to_owned()], vec!["bcd".to_owned(), "9".to_owned(), "x".to_owned()]];
        assert_eq!(table(&rows, &[1]), ["a    10", "bcd   9  x"]);
    }

    #[test]
    fn an_error_becomes_an_object_with_its_facts() {
        let error = Error::new(thruway::ErrorKind::NotFound, "no such thing").with("file", "x").with_hint("look elsewhere");
        let object = error_object(&error);
        assert_eq!(
            object,
            json!({"error": {"kind": "not found", "message": "no such thing", "context": {"file": "x"}, "hint": "look elsewhere"}})
        );
    }
}
