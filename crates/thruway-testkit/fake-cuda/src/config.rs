//! The settings: from the environment, and from the text given to a reset. The crate's documentation lists them.

use std::ffi::c_int;

use crate::inject::Rule;

const PREFIX: &str = "FAKE_CUDA_";

/// How this driver behaves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Config {
    pub(crate) devices: usize,
    pub(crate) name: String,
    pub(crate) memory_bytes: usize,
    pub(crate) pci: Vec<String>,
    pub(crate) version: c_int,
    pub(crate) seed: u64,
    pub(crate) delay_us_min: u64,
    pub(crate) delay_us_max: u64,
    pub(crate) fail: Vec<Rule>,
    pub(crate) fail_late: Vec<Rule>,
    pub(crate) host_offset: usize,
    pub(crate) alignment: usize,
    pub(crate) check: bool,
    pub(crate) capturing: bool,
    pub(crate) wrong_sums: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            devices: 1,
            name: "Fake GPU".to_owned(),
            memory_bytes: 16 << 30,
            pci: Vec::new(),
            version: 13_000,
            seed: 1,
            delay_us_min: 20,
            delay_us_max: 500,
            fail: Vec::new(),
            fail_late: Vec::new(),
            host_offset: 512,
            alignment: 512,
            check: true,
            capturing: false,
            wrong_sums: false,
        }
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
        config.apply(text)?;
        Ok(config)
    }

    fn apply(&mut self, text: &str) -> Result<(), String> {
        for pair in text.split(['\n', ';']).map(str::trim).filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=').ok_or_else(|| format!("{pair:?} is not KEY=value"))?;
            let key = key.trim();
            self.set(key.strip_prefix(PREFIX).unwrap_or(key), value.trim())?;
        }
        Ok(())
    }

    fn set(&mut self, key: &str, value: &str) -> Result<(), String> {
        match key {
            "DEVICES" => self.devices = number(key, value)?,
            "NAME" => self.name = value.to_owned(),
            "MEMORY" => self.memory_bytes = number(key, value)?,
            "PCI" => self.pci = value.split(',').map(|pci| pci.trim().to_owned()).collect(),
            "VERSION" => self.version = number(key, value)?,
            "SEED" => self.seed = number(key, value)?,
            "DELAY_US" => {
                let (min, max) = value.split_once("..").unwrap_or((value, value));
                (self.delay_us_min, self.delay_us_max) = (number(key, min)?, number(key, max)?);
                if self.delay_us_min > self.delay_us_max {
                    return Err(format!("{PREFIX}{key}={value}: the range is empty"));
                }
            }
            "FAIL" => self.fail = Rule::parse_list(value)?,
            "FAIL_LATE" => self.fail_late = Rule::parse_list(value)?,
            "HOST_OFFSET" => self.host_offset = number(key, value)?,
            "ALIGNMENT" => {
                self.alignment = number(key, value)?;
                if !self.alignment.is_power_of_two() {
                    return Err(format!("{PREFIX}{key}={value}: not a power of two"));
                }
            }
            "CAPTURING" => self.capturing = number::<u8>(key, value)? != 0,
            "WRONG_SUMS" => self.wrong_sums = number::<u8>(key, value)? != 0,
            "CHECK" => self.check = number::<u8>(key, value)? != 0,
            _ => return Err(format!("there is no setting {PREFIX}{key}")),
        }
        Ok(())
    }

    /// The PCI address of a device.
    pub(crate) fn pci_of(&self, ordinal: usize) -> String {
        self.pci.get(ordinal).cloned().unwrap_or_else(|| format!("0000:{:02x}:00.0", ordinal + 1))
    }
}

fn number<T: std::str::FromStr>(key: &str, value: &str) -> Result<T, String> {
    value.trim().parse().map_err(|_| format!("{PREFIX}{key}={value}: not a number, or too large"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_pairs_by_line_or_semicolon_with_or_without_the_prefix() {
        let mut config = Config::default();
        config.apply("DEVICES=2; FAKE_CUDA_DELAY_US=5..9\nPCI=0000:41:00.0,0000:c1:00.0").expect("well formed");
        assert_eq!((config.devices, config.delay_us_min, config.delay_us_max), (2, 5, 9));
        assert_eq!((config.pci_of(1).as_str(), config.pci_of(2).as_str()), ("0000:c1:00.0", "0000:03:00.0"));
    }

    #[test]
    fn a_misspelt_setting_is_an_error_since_a_test_that_sets_nothing_proves_nothing() {
        for text in ["DEVICE=1", "SEED", "SEED=x", "DELAY_US=9..5", "FAIL=cuNothing:1:2"] {
            assert!(Config::default().apply(text).is_err(), "{text}");
        }
    }
}
