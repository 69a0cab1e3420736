//! The command line of `thruway checkpoint`.

use std::path::PathBuf;

use clap::{Args as ClapArgs, Subcommand};
use thruway::PathPolicy;

#[derive(Debug, ClapArgs)]
#[command(after_help = "\
DIR is the directory that holds the checkpoints: one directory for each step. Looking disturbs no run that saves there;
`prune` and `recover` refuse while one does.

Examples:
  thruway checkpoint list runs/7b
  thruway checkpoint show runs/7b 12000
  thruway checkpoint verify runs/7b --all
  thruway checkpoint diff runs/7b 11000 12000
  thruway checkpoint prune runs/7b --keep 3 --keep-every 10000 --dry-run
  thruway checkpoint recover runs/7b")]
pub(crate) struct CheckpointArgs {
    #[command(subcommand)]
    pub(crate) command: CheckpointCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum CheckpointCommand {
    /// List the checkpoints, whether their files are all there, and what is unfinished.
    List(DirectoryArgs),
    /// Show what a checkpoint holds. Reads the manifest and headers only.
    Show(ShowArgs),
    /// Read every byte of a checkpoint and hold it against its checksums. Exit status 1 if one does not match.
    Verify(VerifyStepArgs),
    /// Compare two checkpoints by their checksums; no tensor is read. Exit status 1 if they differ.
    Diff(DiffArgs),
    /// Remove old checkpoints. The newest whole one always stays.
    Prune(PruneArgs),
    /// Remove what failed and killed saves left behind. Never touches what is committed.
    Recover(DirectoryArgs),
}

#[derive(Debug, ClapArgs)]
pub(crate) struct DirectoryArgs {
    /// The directory that holds the checkpoints.
    #[arg(value_name = "DIR")]
    pub(crate) directory: PathBuf,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct ShowArgs {
    /// The directory that holds the checkpoints.
    #[arg(value_name = "DIR")]
    pub(crate) directory: PathBuf,
    /// The step [default: the newest].
    #[arg(value_name = "STEP")]
    pub(crate) step: Option<u64>,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct VerifyStepArgs {
    /// The directory that holds the checkpoints.
    #[arg(value_name = "DIR")]
    pub(crate) directory: PathBuf,
    /// The step [default: the newest].
    #[arg(value_name = "STEP")]
    pub(crate) step: Option<u64>,
    /// Every step.
    #[arg(long, conflicts_with = "step")]
    pub(crate) all: bool,
    /// Path by which the bytes are read: auto, staged or cached.
    #[arg(long, value_name = "WAY", default_value = "auto", value_parser = super::policy)]
    pub(crate) path: PathPolicy,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct DiffArgs {
    /// The directory that holds the checkpoints.
    #[arg(value_name = "DIR")]
    pub(crate) directory: PathBuf,
    /// One step.
    #[arg(value_name = "STEP")]
    pub(crate) one: u64,
    /// The step to compare it with.
    #[arg(value_name = "OTHER")]
    pub(crate) other: u64,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct PruneArgs {
    /// The directory that holds the checkpoints.
    #[arg(value_name = "DIR")]
    pub(crate) directory: PathBuf,
    /// The newest so many whole checkpoints stay, at least 1.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) keep: u32,
    /// Those whose step is a multiple of this stay too.
    #[arg(long, value_name = "STEPS", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) keep_every: Option<u64>,
    /// Only say which would go.
    #[arg(long)]
    pub(crate) dry_run: bool,
}
