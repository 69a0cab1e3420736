//! The roofline: of the limits that a way of moving bytes meets, the lowest bounds it.

use serde_json::{Value, json};

use crate::measure::{Limit, limit};
use crate::output::table;

/// What bytes pass on their way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Resource {
    /// The drive.
    Disk,
    /// The processors' path to memory, with the kernel's copying out of the page cache.
    Memory,
    /// The link between host and GPU.
    Pcie,
}

impl Resource {
    const ALL: [Self; 3] = [Self::Disk, Self::Memory, Self::Pcie];

    /// The resource that a limit is one of.
    fn of(name: &str) -> Self {
        match name {
            limit::READ | limit::WRITE => Self::Disk,
            limit::TO_GPU | limit::FROM_GPU => Self::Pcie,
            _ => Self::Memory,
        }
    }

    /// The name for people and in JSON.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Disk => "disk",
            Self::Memory => "memory",
            Self::Pcie => "PCIe",
        }
    }
}

/// The lowest of the limits with these names; those that could not be measured do not count.
pub(crate) fn bound<'a>(names: &[&str], limits: &'a [Limit]) -> Option<(&'a Limit, f64)> {
    let met = limits.iter().filter(|limit| names.contains(&limit.name));
    let known = met.filter_map(|limit| Some((limit, limit.rate.as_ref().ok()?.gb_per_s))).filter(|(_, rate)| *rate > 0.0);
    known.min_by(|(_, one), (_, other)| one.total_cmp(other))
}

/// How a way of moving bytes fares under its roof.
#[derive(Debug)]
pub(crate) struct Roof<'a> {
    /// The way.
    pub(crate) name: &'a str,
    /// The names of the limits that it meets.
    pub(crate) met: &'a [&'a str],
    /// What it reached, if it is to be had.
    pub(crate) gb_per_s: Option<f64>,
    /// How much that is of the lowest.
    pub(crate) ratio: Option<f64>,
}

impl Roof<'_> {
    fn rate_of(&self, resource: Resource, limits: &[Limit]) -> Option<f64> {
        let names: Vec<&str> = self.met.iter().copied().filter(|name| Resource::of(name) == resource).collect();
        bound(&names, limits).map(|(_, rate)| rate)
    }

    fn bound_by(&self, limits: &[Limit]) -> Option<Resource> {
        bound(self.met, limits).map(|(limit, _)| Resource::of(limit.name))
    }

    /// As JSON; limits that the way does not meet are null.
    pub(crate) fn to_json(&self, limits: &[Limit]) -> Value {
        json!({
            "path": self.name,
            "disk_gb_per_s": self.rate_of(Resource::Disk, limits),
            "memory_gb_per_s": self.rate_of(Resource::Memory, limits),
            "pcie_gb_per_s": self.rate_of(Resource::Pcie, limits),
            "bound_by": self.bound_by(limits).map(Resource::name),
            "gb_per_s": self.gb_per_s,
            "ratio": self.ratio,
        })
    }
}

/// The roofline for people.
pub(crate) fn roofline(roofs: &[Roof<'_>], limits: &[Limit]) -> Vec<String> {
    let heads = ["ROOFLINE", "DISK", "MEMORY", "PCIe", "BOUND BY", "GB/s", "OF IT"];
    let figure = |figure: Option<f64>| figure.map_or_else(|| "–".to_owned(), |figure| format!("{figure:.2}"));
    let mut rows = vec![heads.map(str::to_owned).to_vec()];
    for roof in roofs {
        let mut row = vec![roof.name.to_owned()];
        row.extend(Resource::ALL.map(|resource| figure(roof.rate_of(resource, limits))));
        row.push(roof.bound_by(limits).map_or("–", Resource::name).to_owned());
        row.extend([figure(roof.gb_per_s), figure(roof.ratio)]);
        rows.push(row);
    }
    table(&rows, &[1, 2, 3, 5, 6])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_known_limit_bounds() {
        let unknown = Limit { name: limit::CACHE_ALL_WARM, rate: Err("no".to_owned()) };
        let limits = [Limit::known(limit::READ, 2.0, "a"), Limit::known(limit::TO_GPU, 50.0, "b"), unknown];
        let met = [limit::READ, limit::TO_GPU, limit::CACHE_ALL_WARM];
        let roof = Roof { name: "a way", met: &met, gb_per_s: Some(1.5), ratio: Some(0.75) };
        let object = roof.to_json(&limits);
        assert_eq!(
            (&object["bound_by"], &object["ratio"], &object["memory_gb_per_s"]),
            (&"disk".into(), &0.75.into(), &Value::Null)
        );
        assert!(bound(&[limit::WRITE], &limits).is_none());
        assert_eq!(roofline(&[roof], &limits)[1], "a way     2.00       –  50.00  disk      1.50   0.75");
    }
}
