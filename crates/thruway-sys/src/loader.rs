//! Opening a shared library by the names that it may have, and taking symbols from it.

use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};

use libloading::os::unix;

/// A shared library that stays open for the life of the process.
///
/// The handle may be dropped at any time: that closes nothing, so function pointers taken from it stay good for ever.
#[derive(Debug)]
pub struct Library {
    inner: &'static unix::Library,
    name: PathBuf,
}

/// Why a table of functions could not be filled.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LoadError {
    /// No candidate could be opened. The normal case on a machine without the vendor's software.
    NotOpened {
        /// Every name that was tried, in order, and what the loader said about it.
        attempts: Vec<Attempt>,
    },
    /// The library was opened, but it lacks a function that is needed: it is too old, or it is something else.
    MissingSymbol {
        /// The library, by the name under which it was opened.
        library: PathBuf,
        /// The symbol that it lacks.
        symbol: String,
        /// What the loader said.
        reason: String,
    },
}

/// One attempt to open a library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempt {
    /// The name or path given to the loader.
    pub name: PathBuf,
    /// What the loader said.
    pub reason: String,
}

impl Library {
    /// Opens the first of `candidates` that can be opened. A candidate with a slash is a path; one without is looked up
    /// as the dynamic loader does (`LD_LIBRARY_PATH`, the loader's cache, the system's folders).
    ///
    /// Opening a library runs its initialisers, so this trusts the candidates as far as the dynamic loader trusts its
    /// own search path: name only what may run in this process.
    pub fn open<I>(candidates: I) -> Result<Self, LoadError>
    where
        I: IntoIterator,
        I::Item: Into<OsString>,
    {
        let mut attempts = Vec::new();
        for candidate in candidates {
            let name = candidate.into();
            // RTLD_LOCAL: two libraries that export the same names (a driver and a stand-in for it) must not see each
            // other. RTLD_NOW: a library that lacks a dependency fails here, where it can be reported.
            // SAFETY: initialisers run in the loader's own order; that they are sound is the caller's trust in the
            // names, as said above.
            match unsafe { unix::Library::open(Some(&name), unix::RTLD_NOW | unix::RTLD_LOCAL) } {
                // The leak is the point: see the type.
                Ok(inner) => return Ok(Self { inner: Box::leak(Box::new(inner)), name: name.into() }),
                Err(error) => attempts.push(Attempt { name: name.into(), reason: reason(&error) }),
            }
        }
        Err(LoadError::NotOpened { attempts })
    }

    /// The name under which the library was opened.
    pub fn name(&self) -> &Path {
        &self.name
    }

    /// The function called `symbol`.
    ///
    /// # Safety
    /// `F` must be a function pointer type that matches the symbol's C signature and calling convention.
    pub unsafe fn function<F: Copy>(&self, symbol: &str) -> Result<F, LoadError> {
        // SAFETY: the caller promises that `F` is the symbol's type; the library is never closed.
        let found = unsafe { self.inner.get::<F>(symbol.as_bytes()) };
        let reason = match found {
            // A symbol may legally have the address 0, but no function pointer may.
            Ok(found) if found.clone().as_raw_ptr().is_null() => "its address is null".to_owned(),
            Ok(found) => return Ok(*found),
            Err(error) => reason(&error),
        };
        Err(LoadError::MissingSymbol { library: self.name.clone(), symbol: symbol.to_owned(), reason })
    }
}

/// What the loader said. `libloading`'s own text is "dlopen failed"; the sentence that helps is its source.
fn reason(error: &libloading::Error) -> String {
    match std::error::Error::source(error) {
        Some(source) => source.to_string(),
        None => error.to_string(),
    }
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotOpened { attempts } if attempts.is_empty() => write!(f, "no library name to try"),
            Self::NotOpened { attempts } => {
                write!(f, "no library could be opened: ")?;
                for (index, attempt) in attempts.iter().enumerate() {
                    let separator = if index == 0 { "" } else { "; " };
                    write!(f, "{separator}{} ({})", attempt.name.display(), attempt.reason)?;
                }
                Ok(())
            }
            Self::MissingSymbol { library, symbol, reason } => {
                write!(f, "{} has no function {symbol} ({reason})", library.display())
            }
        }
    }
}

impl std::error::Error for LoadError {}

/// Declares a table of function pointers and how to fill it.
///
/// Each line is a C prototype in Rust's words, and becomes a field called exactly as the exported symbol. Those after
/// `optional:` are `None` where the library lacks them; any other missing symbol fails the whole load. The table also
/// remembers the name of its library.
macro_rules! symbol_table {
    (
        $(#[$table_doc:meta])*
        pub struct $table:ident;
        required: { $( $(#[$doc:meta])* fn $name:ident($($arg:ident: $ty:ty),* $(,)?) -> $ret:ty; )* }
        optional: { $( $(#[$opt_doc:meta])* fn $opt_name:ident($($opt_arg:ident: $opt_ty:ty),* $(,)?) -> $opt_ret:ty; )* }
    ) => {
        $(#[$table_doc])*
        #[allow(non_snake_case, reason = "a field has the name that the C header gives the function")]
        #[derive(Clone, Debug)]
        pub struct $table {
            library: std::path::PathBuf,
            $( $(#[$doc])* pub $name: unsafe extern "C" fn($($arg: $ty),*) -> $ret, )*
            $( $(#[$opt_doc])* pub $opt_name: Option<unsafe extern "C" fn($($opt_arg: $opt_ty),*) -> $opt_ret>, )*
        }

        impl $table {
            /// The name or path under which the library was opened.
            pub fn library(&self) -> &std::path::Path {
                &self.library
            }

            /// Fills the table from an open library.
            fn fill(library: &$crate::loader::Library) -> Result<Self, $crate::LoadError> {
                Ok(Self {
                    library: library.name().to_owned(),
                    // SAFETY: the field's type is the signature that the C header gives for this symbol, checked by
                    // hand against the header when the line was written.
                    $( $name: unsafe { library.function(stringify!($name)) }?, )*
                    // SAFETY: as above.
                    $( $opt_name: unsafe { library.function(stringify!($opt_name)) }.ok(), )*
                })
            }
        }
    };
}
pub(crate) use symbol_table;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_an_error_that_names_every_candidate_and_the_reason() {
        let error = Library::open(["libthruway-none.so.9", "/nonexistent/libnone.so"]).expect_err("neither exists");
        let LoadError::NotOpened { attempts } = &error else { panic!("{error:?}") };
        assert_eq!(attempts.len(), 2);
        let line = error.to_string();
        assert!(line.contains("libthruway-none.so.9 (") && line.contains("/nonexistent/libnone.so ("), "{line}");
        assert!(attempts.iter().all(|attempt| attempt.reason.contains("No such file")), "{attempts:?}");
    }

    #[test]
    fn the_first_candidate_that_opens_wins_and_a_missing_symbol_is_named() {
        let library = Library::open(["libthruway-none.so.9", "libc.so.6"]).expect("every Linux has a C library");
        assert_eq!(library.name(), Path::new("libc.so.6"));
        // SAFETY: `int abs(int)` is C's; `fn(i32) -> i32` is its type.
        let abs: unsafe extern "C" fn(i32) -> i32 = unsafe { library.function("abs") }.expect("abs");
        // SAFETY: any i32 other than the least is allowed.
        assert_eq!(unsafe { abs(-3) }, 3);
        // SAFETY: the symbol does not exist, so nothing of this type is made.
        let missing = unsafe { library.function::<unsafe extern "C" fn()>("thruway_no_such_symbol") };
        let error = missing.expect_err("no such symbol");
        assert!(error.to_string().contains("libc.so.6 has no function thruway_no_such_symbol"), "{error}");
    }
}
