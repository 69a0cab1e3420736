//! The other process: how it is started, and what it does.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, BufWriter, Error, ErrorKind, Read, Result, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::OnceLock;

use super::{Call, Look, Seen, Unseen};

/// No question and no reason why there is no answer is longer.
const LINE_BYTES_MAX: u64 = 1 << 20;
/// No answer is.
const ANSWER_BYTES_MAX: usize = 64 << 20;

static AGAIN: OnceLock<Vec<OsString>> = OnceLock::new();

/// From now on looks are done by a process that this program and its arguments start, and which calls [`serve`]. The first one
/// who says so is heard.
pub fn look_through(again: Vec<OsString>) {
    drop(AGAIN.set(again));
}

pub(super) fn is_named() -> bool {
    AGAIN.get().is_some()
}

/// What a helper does: answers on standard output what it is asked on standard input, until that ends.
///
/// # Errors
/// Whatever is in the way of reading questions and writing answers.
pub fn serve(call: Call) -> Result<()> {
    // What is typed at a terminal does not concern it, nor does the end of its session. It fails for one that has its own.
    rustix::process::setsid().ok();
    let (mut questions, mut answers) = (std::io::stdin().lock(), BufWriter::new(std::io::stdout().lock()));
    while let Some(look) = line::<Look>(&mut questions)? {
        let seen = look.at(call);
        let head: std::result::Result<usize, &Unseen> = seen.as_ref().map(Vec::len);
        writeln!(answers, "{}", serde_json::to_string(&head)?)?;
        answers.write_all(&seen.unwrap_or_default())?;
        answers.flush()?;
    }
    Ok(())
}

/// A helper that waits for questions. When it is dropped there are no more of them.
pub(super) struct Helper {
    questions: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Helper {
    pub(super) fn start() -> Result<(Self, Child)> {
        let (program, arguments) = AGAIN.get().and_then(|again| again.split_first()).ok_or(ErrorKind::NotFound)?;
        // None of this process's streams: whoever waits for their end must not wait for a helper that was left behind.
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        // Nor what whoever started this process left open to it. Before Linux 5.11 that cannot be done at once, and stays open.
        let close_the_rest = || {
            // SAFETY: a system call that takes three numbers, and marks descriptors to be closed when the program starts.
            unsafe { libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC) };
            Ok(())
        };
        // SAFETY: it makes one system call, and neither allocates nor locks.
        unsafe { command.pre_exec(close_the_rest) };
        let mut child = command.spawn()?;
        let (questions, answers) = child.stdin.take().zip(child.stdout.take()).ok_or(ErrorKind::BrokenPipe)?;
        Ok((Self { questions, answers: BufReader::new(answers) }, child))
    }

    /// # Errors
    /// That the helper has ended, or said what is no answer.
    pub(super) fn ask(&mut self, look: &Look) -> Result<Seen> {
        self.questions.write_all(format!("{}\n", serde_json::to_string(look)?).as_bytes())?;
        let head = line::<std::result::Result<usize, Unseen>>(&mut self.answers)?.ok_or(ErrorKind::UnexpectedEof)?;
        let length = match head {
            Ok(length) if length <= ANSWER_BYTES_MAX => length,
            Ok(_) => return Err(ErrorKind::InvalidData.into()),
            Err(unseen) => return Ok(Err(unseen)),
        };
        let mut seen = vec![0; length];
        self.answers.read_exact(&mut seen)?;
        Ok(Ok(seen))
    }
}

/// One line of JSON; `None` at the end.
fn line<T: serde::de::DeserializeOwned>(from: &mut impl BufRead) -> Result<Option<T>> {
    let mut text = String::new();
    if from.take(LINE_BYTES_MAX).read_line(&mut text)? == 0 {
        return Ok(None);
    }
    serde_json::from_str(&text).map(Some).map_err(Error::from)
}
