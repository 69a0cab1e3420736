//! The state of a training run whose bytes are known at every step.

use thruway::checkpoint::{Group, Json, Restored};
use thruway::format::safetensors::Dtype;

use crate::fixtures::{KnownModel, model};

/// A model and its optimizer at a step. Names of tensors stand in both, and some look like paths.
#[derive(Clone, Debug)]
pub struct State {
    /// What it was made from.
    pub step: u64,
    /// The weights.
    pub model: KnownModel,
    /// What the optimizer keeps.
    pub optimizer: KnownModel,
}

impl State {
    /// The state at a step: of some 60 KB, in tensors of several chunks, of one, and of nothing.
    pub fn at(step: u64) -> Self {
        let weights: &[(&str, Dtype, &[u64])] = &[
            ("embed", Dtype::BF16, &[100, 130]),
            ("layers.0/../weight", Dtype::F32, &[70, 90]),
            ("norm", Dtype::F32, &[90]),
            ("scale", Dtype::F64, &[]),
            ("empty", Dtype::F16, &[0, 5]),
            ("mask", Dtype::Bool, &[33]),
        ];
        let moments: &[(&str, Dtype, &[u64])] = &[("embed", Dtype::F32, &[100, 13]), ("step", Dtype::I64, &[])];
        Self { step, model: model(step * 2, weights), optimizer: model(step * 2 + 1, moments) }
    }

    /// The state of a few small tensors at a step, for tests that cut a save at every operation.
    pub fn tiny(step: u64) -> Self {
        let weights: &[(&str, Dtype, &[u64])] = &[("a", Dtype::F32, &[7, 300]), ("b", Dtype::U8, &[13])];
        Self { step, model: model(step * 2, weights), optimizer: model(step * 2 + 1, &[("a", Dtype::F32, &[7, 11])]) }
    }

    /// What a save takes.
    pub fn groups(&self) -> Vec<Group> {
        vec![Group::new("model", self.model.sources()), Group::new("optimizer", self.optimizer.sources())]
    }

    /// What is kept beside the tensors.
    ///
    /// # Panics
    /// Never: it is JSON.
    pub fn structure(&self) -> Json {
        Json::new(format!("{{\"step\":{},\"rng\":[1,2,3],\"lr\":0.001}}", self.step)).expect("it is JSON")
    }

    /// How what was restored differs; `None` if every byte is the same.
    pub fn difference(&self, restored: &Restored) -> Option<String> {
        if restored.checkpoint.manifest().structure != self.structure() {
            return Some("the structure is another".to_owned());
        }
        let of = |group: &str, known: &KnownModel| match restored.groups.get(group) {
            Some(loaded) => known.difference(&loaded.tensors),
            None => Some(format!("there is no {group}")),
        };
        of("model", &self.model).or_else(|| of("optimizer", &self.optimizer))
    }
}
