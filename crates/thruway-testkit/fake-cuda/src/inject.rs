//! Calls counted, and made to fail on request.

use std::collections::BTreeMap;

use thruway_sys::cuda::CUresult;

use crate::api::SYMBOLS;
use crate::names;

/// One line of `FAKE_CUDA_FAIL`: which call of which function fails, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rule {
    symbol: &'static str,
    /// Which call, from 1; none means every one.
    nth: Option<u64>,
    code: CUresult,
}

impl Rule {
    /// Reads `symbol:nth:code[,…]`. A symbol that is not exported is an error: such a rule would never fire, and the test
    /// would pass for the wrong reason.
    pub(crate) fn parse_list(text: &str) -> Result<Vec<Self>, String> {
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
        let code = names::parse(code).ok_or_else(|| format!("{text:?} ends in no known code"))?;
        Ok(Self { symbol, nth, code })
    }

    /// The code with which the `nth` call of `symbol` fails by these rules.
    pub(crate) fn find(rules: &[Self], symbol: &str, nth: u64) -> Option<CUresult> {
        rules.iter().find(|rule| rule.symbol == symbol && rule.nth.is_none_or(|wanted| wanted == nth)).map(|rule| rule.code)
    }
}

/// How often each function was called.
#[derive(Debug, Default)]
pub(crate) struct Calls(BTreeMap<&'static str, u64>);

impl Calls {
    /// Counts a call, and says which one of its function it is, from 1.
    pub(crate) fn count(&mut self, symbol: &'static str) -> u64 {
        let count = self.0.entry(symbol).or_default();
        *count += 1;
        *count
    }

    /// How often `symbol` was called.
    pub(crate) fn of(&self, symbol: &str) -> u64 {
        self.0.get(symbol).copied().unwrap_or(0)
    }

    /// All counts.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.0.iter().map(|(symbol, count)| (*symbol, *count))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use thruway_sys::cuda::{CUDA_ERROR_LAUNCH_FAILED, CUDA_ERROR_OUT_OF_MEMORY};

    #[test]
    fn rules_name_a_function_with_or_without_its_version_and_a_code_by_name_or_number() {
        let rules = Rule::parse_list("cuMemAlloc:3:OUT_OF_MEMORY, cuStreamCreate:*:719").expect("both are well formed");
        assert_eq!(Rule::find(&rules, "cuMemAlloc_v2", 3), Some(CUDA_ERROR_OUT_OF_MEMORY));
        assert_eq!(Rule::find(&rules, "cuMemAlloc_v2", 2), None);
        assert_eq!(Rule::find(&rules, "cuStreamCreate", 77), Some(CUDA_ERROR_LAUNCH_FAILED));
    }

    #[test]
    fn a_rule_that_could_never_fire_is_refused() {
        for text in ["cuMemAllok:1:2", "cuInit:1", "cuInit:first:2", "cuInit:1:WHATEVER"] {
            assert!(Rule::parse_list(text).is_err(), "{text}");
        }
    }
}
