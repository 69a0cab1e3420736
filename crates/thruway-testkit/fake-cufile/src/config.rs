//! The settings: from the environment, and from the text given to a reset. The crate's documentation lists them.

use std::ffi::c_int;
use std::path::PathBuf;

use crate::api::SYMBOLS;

const PREFIX: &str = "FAKE_CUFILE_";

/// Which way bytes go, as the counters tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Nvfs,
    P2p,
    Posix,
}

/// What the counters are worth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Counters {
    True,
    Still,
    Half,
    Other,
    Absent,
}

/// How this library behaves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Config {
    pub(crate) version: c_int,
    pub(crate) way: Way,
    pub(crate) allow_compat: bool,
    pub(crate) counters: Counters,
    pub(crate) nvfs_stats: Option<PathBuf>,
    pub(crate) report: Option<PathBuf>,
    pub(crate) fail: Vec<Rule>,
    pub(crate) cu_err: u32,
    pub(crate) short: usize,
    pub(crate) delay_us: (u64, u64),
    pub(crate) seed: u64,
    pub(crate) handles_max: usize,
    pub(crate) pinned_max: usize,
    pub(crate) pooled: bool,
    pub(crate) damage: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            version: 1150,
            way: Way::Nvfs,
            allow_compat: false,
            counters: Counters::True,
            nvfs_stats: None,
            report: None,
            fail: Vec::new(),
            cu_err: 0,
            short: 0,
            delay_us: (0, 200),
            seed: 1,
            handles_max: 1 << 20,
            pinned_max: 32 << 30,
            pooled: false,
            damage: false,
        }
    }
}

/// Which call of which function fails, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rule {
    symbol: &'static str,
    /// Which call, from 1; none means every one.
    nth: Option<u64>,
    pub(crate) code: i32,
    /// Whether a read or a write returns -1 and puts the code into `errno`.
    pub(crate) in_errno: bool,
}

impl Rule {
    /// Reads `symbol:nth:code[,…]`. A symbol that is not exported is an error: such a rule would never fire, and the test
    /// would pass for the wrong reason.
    fn parse_list(text: &str) -> Result<Vec<Self>, String> {
        text.split(',').map(str::trim).filter(|rule| !rule.is_empty()).map(Self::parse).collect()
    }

    fn parse(text: &str) -> Result<Self, String> {
        let parts: Vec<&str> = text.split(':').map(str::trim).collect();
        let &[symbol, nth, code] = parts.as_slice() else { return Err(format!("{text:?} is not symbol:nth:code")) };
        let symbol = SYMBOLS.iter().find(|have| **have == symbol || have.strip_suffix("_v2") == Some(symbol));
        let symbol = *symbol.ok_or_else(|| format!("{text:?} names a function that is not exported"))?;
        let nth = match nth {
            "*" => None,
            _ => Some(nth.parse().map_err(|_| format!("{text:?} counts the call by no number"))?),
        };
        let digits = code.strip_prefix('e').unwrap_or(code);
        let number: i32 = digits.parse().map_err(|_| format!("{text:?} ends in no number"))?;
        Ok(Self { symbol, nth, code: number, in_errno: digits != code || number < 5000 })
    }

    /// The rule by which the `nth` call of `symbol` fails.
    pub(crate) fn find<'a>(rules: &'a [Self], symbol: &str, nth: u64) -> Option<&'a Self> {
        rules.iter().find(|rule| rule.symbol == symbol && rule.nth.is_none_or(|wanted| wanted == nth))
    }
}

impl Config {
    /// The defaults, changed by the environment, changed by `text`: `KEY=value` pairs on lines of their own or separated
    /// by semicolons, the keys without the prefix or with it.
    pub(crate) fn read(text: &str) -> Result<Self, String> {
        let mut config = Self::default();
        for (key, value) in std::env::vars_os() {
            if let Some(key) = key.to_str().and_then(|key| key.strip_prefix(PREFIX)) {
                config.set(key, &value.to_string_lossy())?;
            }
        }
        for pair in text.split(['\n', ';']).map(str::trim).filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=').ok_or_else(|| format!("{pair:?} is not KEY=value"))?;
            let key = key.trim();
            config.set(key.strip_prefix(PREFIX).unwrap_or(key), value.trim())?;
        }
        Ok(config)
    }

    fn set(&mut self, key: &str, value: &str) -> Result<(), String> {
        let unknown = || format!("{PREFIX}{key}={value}: no such value");
        match key {
            "VERSION" => self.version = number(key, value)?,
            "WAY" => {
                let ways = [("nvfs", Way::Nvfs), ("p2p", Way::P2p), ("posix", Way::Posix)];
                self.way = ways.iter().find(|(name, _)| *name == value).ok_or_else(unknown)?.1;
            }
            "ALLOW_COMPAT" => self.allow_compat = number::<u8>(key, value)? != 0,
            "COUNTERS" => {
                let all = [
                    ("true", Counters::True),
                    ("still", Counters::Still),
                    ("half", Counters::Half),
                    ("other", Counters::Other),
                    ("absent", Counters::Absent),
                ];
                self.counters = all.iter().find(|(name, _)| *name == value).ok_or_else(unknown)?.1;
            }
            "REPORT" => self.report = Some(PathBuf::from(value)),
            "NVFS_STATS" => self.nvfs_stats = Some(PathBuf::from(value)),
            "FAIL" => self.fail = Rule::parse_list(value)?,
            "CU_ERR" => self.cu_err = number(key, value)?,
            "SHORT" => self.short = number(key, value)?,
            "DELAY_US" => {
                let (min, max) = value.split_once("..").unwrap_or((value, value));
                self.delay_us = (number(key, min)?, number(key, max)?);
                if self.delay_us.0 > self.delay_us.1 {
                    return Err(format!("{PREFIX}{key}={value}: the range is empty"));
                }
            }
            "SEED" => self.seed = number(key, value)?,
            "HANDLES_MAX" => self.handles_max = number(key, value)?,
            "PINNED_MAX" => self.pinned_max = number(key, value)?,
            "POOLED" => self.pooled = number::<u8>(key, value)? != 0,
            "DAMAGE" => self.damage = number::<u8>(key, value)? != 0,
            _ => return Err(format!("there is no setting {PREFIX}{key}")),
        }
        Ok(())
    }
}

fn number<T: std::str::FromStr>(key: &str, value: &str) -> Result<T, String> {
    value.trim().parse().map_err(|_| format!("{PREFIX}{key}={value}: not a number, or too large"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelt_setting_is_an_error_since_a_test_that_sets_nothing_proves_nothing() {
        for text in ["VERSIONS=1", "SEED", "WAY=host", "DELAY_US=9..5", "FAIL=cuFileReed:1:2", "FAIL=cuFileRead:1:x"] {
            assert!(Config::read(text).is_err(), "{text}");
        }
        let rules = Config::read("FAIL=cuFileRead:2:5, cuFileWrite:*:e5027").expect("well formed").fail;
        assert_eq!(Rule::find(&rules, "cuFileRead", 2).map(|rule| (rule.code, rule.in_errno)), Some((5, true)));
        assert_eq!(Rule::find(&rules, "cuFileRead", 1), None);
        assert_eq!(Rule::find(&rules, "cuFileWrite", 9).map(|rule| (rule.code, rule.in_errno)), Some((5027, true)));
    }
}
