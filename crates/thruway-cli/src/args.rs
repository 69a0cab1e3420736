//! The command line. Parsing has no effects: what is on disk is looked at later.

pub(crate) mod checkpoint;

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

use clap::{ArgAction, Args as ClapArgs, Parser, Subcommand};
use thruway::{ByteSize, Device, Error, PathPolicy};

const EXAMPLES: &str = "\
Examples:
  thruway demo                                  see it work on this machine, end to end
  thruway load model/ --digest                  load a model and print the digest of each tensor
  thruway explain model/                        which way each file's bytes would go, and why
  thruway copy model/ fast/ --max-shard-size 5GB
  thruway inspect model.safetensors
  thruway verify copy/ --against model/
  thruway checkpoint list runs/7b
  thruway bench --size 4GB --json
  thruway doctor /mnt/nvme                      is there a direct path to a GPU, and what is in the way
  thruway setup /mnt/nvme                       what is missing for one; --apply carries it out

Sizes: kB, MB, GB, TB count in thousands; KiB, MiB, GiB, TiB (and K, M, G, T) in powers of 1024.
Exit status: 0 fine, 1 failed or a check found a fault, 2 the command line made no sense,
3 (doctor, setup, verify-direct) by a slower path,
130 stopped by SIGINT, SIGTERM or SIGHUP.
A path that begins with a dash goes behind `--`.";

/// Moves tensors between storage and memory by the shortest path the machine has, and says which path it took.
#[derive(Debug, Parser)]
#[command(name = "thruway", version, after_help = EXAMPLES, arg_required_else_help = true, subcommand_required = true)]
pub(crate) struct Args {
    /// Print one JSON object on standard output, errors included.
    #[arg(long, global = true, action = ArgAction::SetTrue)]
    pub(crate) json: bool,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Show it end to end: make a model, save it, read it back every way, check every byte, compare with the limits.
    Demo(DemoArgs),
    /// Load a model into memory and say how it went.
    Load(LoadArgs),
    /// Say of each file of a model which path a load would take, and why. Loads nothing.
    Explain(ExplainArgs),
    /// Copy a model, laid out for fast loading; as one file, as it is sharded, or sharded anew.
    Copy(CopyArgs),
    /// List the tensors, the files and the metadata of a model. Reads headers only.
    Inspect(InspectArgs),
    /// Read every byte of a model, and compare it with another one.
    Verify(VerifyArgs),
    /// Training checkpoints: list, show, verify, compare, prune, recover.
    Checkpoint(checkpoint::CheckpointArgs),
    /// Measure this machine's limits and Thruway on each path beside them.
    Bench(BenchArgs),
    /// Say whether there is a direct path between storage and GPUs, and what is in the way. Changes nothing.
    Doctor(DoctorArgs),
    /// Say, step by step, what is missing for a direct path, and with --apply do it.
    Setup(SetupArgs),
    /// Draw the machine: sockets, PCIe switches, GPUs, drives, network cards, and which GPU and which mount belong together.
    Topo(TopoArgs),
    /// Write and read scratch bytes by every path there is, compare them, and say whether the direct path is proven.
    VerifyDirect(VerifyDirectArgs),
    /// Check, explain or write cufile.json, the settings of NVIDIA's libcufile.
    Config(ConfigArgs),
    /// Look at files for another process of this program, which asks on standard input.
    #[command(name = crate::facts::HELPER, hide = true)]
    Look,
}

#[derive(Debug, ClapArgs)]
#[command(after_help = "\
It says what is expected; only bytes that were moved prove it. Needs no root, and says what it could not see without.
Exit status: 0 a direct path is expected for every PATH, 3 all works by a slower one, 1 something is broken.

Examples:
  thruway doctor /mnt/nvme
  thruway doctor /mnt/nvme --capture machine.txt    what it was told, to be looked at elsewhere; read it before you send it
  thruway doctor --from machine.txt")]
pub(crate) struct DoctorArgs {
    /// Directories or files on the storage in question [default: the current directory, or those of the capture].
    #[arg(value_name = "PATH")]
    pub(crate) paths: Vec<PathBuf>,
    /// Write the facts that were used to this new file, without names of hosts, serial numbers and network addresses.
    #[arg(long, value_name = "FILE", conflicts_with = "from")]
    pub(crate) capture: Option<PathBuf>,
    /// Diagnose a capture, or a directory that holds another machine's /proc, /sys and /etc, instead of this machine.
    #[arg(long, value_name = "FILE|DIR")]
    pub(crate) from: Option<PathBuf>,
    /// Show what is well and what does not apply, too.
    #[arg(long)]
    pub(crate) all: bool,
}

#[derive(Debug, ClapArgs)]
#[command(after_help = "\
For Ubuntu, Debian, the RHEL family and SLES. Without --apply nothing is changed. With it each step is asked for; the first
failure ends it, and every file is as it was before, and so is the initial RAM disk. Of a file that is replaced the old one
stays beside it, as FILE.old, or as FILE.old.2 and so on where there is one. In a container it says what belongs on the host.
Exit status: 0 the plan, or the steps carried out; 3 no direct path can be opened by it, or not before something is done by
hand; 1 a step failed, or must not be begun; after --apply, without a restart to wait for, that of the doctor.

Examples:
  thruway setup /mnt/nvme
  sudo thruway setup /mnt/nvme --apply
  thruway setup --from machine.txt                  what another machine lacks")]
pub(crate) struct SetupArgs {
    /// Directories or files on the storage in question [default: the current directory, or those of the capture; / with
    /// --root].
    #[arg(value_name = "PATH")]
    pub(crate) paths: Vec<PathBuf>,
    /// Carry the steps out, each after a question.
    #[arg(long)]
    pub(crate) apply: bool,
    /// Do not ask.
    #[arg(long, requires = "apply")]
    pub(crate) yes: bool,
    /// Set up the system whose files lie below this directory, by way of chroot; loads no module.
    #[arg(long, value_name = "DIR", conflicts_with = "from")]
    pub(crate) root: Option<PathBuf>,
    /// Plan for a captured machine instead of this one.
    #[arg(long, value_name = "FILE|DIR", conflicts_with = "apply")]
    pub(crate) from: Option<PathBuf>,
}

#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Examples:
  thruway topo
  thruway topo /mnt/nvme /data --svg machine.svg
  thruway topo --from machine.txt --json            of a capture that `thruway doctor --capture` wrote")]
pub(crate) struct TopoArgs {
    /// Directories or files on the storage in question [default: the mounts of block devices and of servers, or
    /// the places of the capture].
    #[arg(value_name = "PATH")]
    pub(crate) paths: Vec<PathBuf>,
    /// Draw it as a picture, too, in this new file.
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,
    /// Draw a captured machine, or one whose /proc and /sys lie in a directory, instead of this one.
    #[arg(long, value_name = "FILE|DIR")]
    pub(crate) from: Option<PathBuf>,
}

#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Nothing is left behind; what a run that was killed has left there, the next one removes.
Exit status: 0 the direct path is proven, 3 all works and none is proven, 1 bytes differ, or it failed.

Examples:
  thruway verify-direct /mnt/nvme
  thruway verify-direct /mnt/nvme --size 4GB --json")]
pub(crate) struct VerifyDirectArgs {
    /// Directory (or a file beside which) to work in. A subdirectory is made there and removed at the end.
    #[arg(value_name = "PATH")]
    pub(crate) path: PathBuf,
    /// Bytes to move each way, such as 256MiB; at least 1MB.
    #[arg(long, value_name = "SIZE", default_value = "256MiB", value_parser = work_size)]
    pub(crate) size: ByteSize,
    /// Memory at the other end: auto (a GPU's, if there is one), host or cuda:N.
    #[arg(long, value_name = "DEVICE", default_value = "auto", value_parser = device)]
    pub(crate) device: Device,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct ConfigArgs {
    #[command(subcommand)]
    pub(crate) action: ConfigAction,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ConfigAction {
    /// Check every key: known, in its place, of its type, in its range. Exit status 1 if something must be repaired.
    Check(ConfigFile),
    /// Say of every key what is in force, whether the file says so, what would be without it, and what it does.
    Explain(ConfigFile),
    /// Forbid the silent way through the host, keeping comments and the rest. The old file stays beside it.
    Write(ConfigWriteArgs),
}

#[derive(Debug, ClapArgs)]
pub(crate) struct ConfigFile {
    /// The file [default: the one that libcufile reads: $CUFILE_ENV_PATH_JSON, else /etc/cufile.json].
    #[arg(value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,
}

#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Examples:
  thruway config write ./cufile.json --p2pdma
  thruway config write ./cufile.json --set execution.max_io_threads=8
  CUFILE_ENV_PATH_JSON=$PWD/cufile.json python train.py")]
pub(crate) struct ConfigWriteArgs {
    /// The file; made if it is not there [default: the one that libcufile reads: $CUFILE_ENV_PATH_JSON, else
    /// /etc/cufile.json].
    #[arg(value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,
    /// Use the kernel's PCI P2PDMA for NVMe drives, too.
    #[arg(long)]
    pub(crate) p2pdma: bool,
    /// Set another key, its value as JSON or a word (`properties.io_batchsize=64`, `logging.level=DEBUG`); may be given several
    /// times.
    #[arg(long, value_name = "KEY=VALUE")]
    pub(crate) set: Vec<String>,
}

#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Examples:
  thruway demo
  thruway demo --dir /mnt/nvme --size 8GB
  thruway demo --model model/ --keep")]
pub(crate) struct DemoArgs {
    /// Directory to work in. A subdirectory is made there and removed at the end.
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub(crate) dir: PathBuf,
    /// Bytes of the model to make, such as 512MiB or 8GB; at least 1MB.
    #[arg(long, value_name = "SIZE", default_value = "1GB", value_parser = work_size)]
    pub(crate) size: ByteSize,
    /// Use this model instead of making one: a file, a directory of shards, or an index.
    #[arg(long, value_name = "PATH", conflicts_with = "size")]
    pub(crate) model: Option<PathBuf>,
    /// Memory to load to: auto (a GPU's, if there is one), host or cuda:N.
    #[arg(long, value_name = "DEVICE", default_value = "auto", value_parser = device)]
    pub(crate) device: Device,
    /// Keep the subdirectory with the saved model.
    #[arg(long)]
    pub(crate) keep: bool,
}

#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Examples:
  thruway load model.safetensors
  thruway load model/ --path staged --json
  thruway load model/ --device cuda:0 --repeat 5
  thruway load model/ --device pci:0000:03:00.0 --path direct
  thruway load model/ --digest > digests.txt")]
pub(crate) struct LoadArgs {
    /// The model: a safetensors file, a directory of shards, or an index.
    #[arg(value_name = "PATH")]
    pub(crate) model: PathBuf,
    /// Memory to load to: auto (a GPU's, if there is one), host, cuda:N, or the memory that a PCI device publishes, such as
    /// pci:0000:03:00.0.
    #[arg(long, value_name = "DEVICE", default_value = "auto", value_parser = device)]
    pub(crate) device: Device,
    /// Path that the bytes must take: auto, direct, staged or cached. What cannot be had is an error.
    #[arg(long, value_name = "WAY", default_value = "auto", value_parser = policy)]
    pub(crate) path: PathPolicy,
    /// Measured rates that the choice of path follows, as `thruway bench --save-profile` writes them [default: none, or what
    /// THRUWAY_PROFILE names].
    #[arg(long, value_name = "FILE")]
    pub(crate) profile: Option<PathBuf>,
    /// Print the SHA-256 digest of each tensor, as it lies in memory, on standard output, and all else on standard error.
    #[arg(long)]
    pub(crate) digest: bool,
    /// Load so many times in this process, 1 to 1000; each load's memory is freed before the next.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) repeat: u32,
}

#[derive(Debug, ClapArgs)]
#[command(after_help = "\
It is found out as a load finds it out, up to where bytes move: memory is allocated and let go of, and where a direct path
may be, one block is read to try it. A required path that is not to be had is the error that the load would report.

Examples:
  thruway explain model/
  thruway explain model/ --device cuda:0 --path direct --json")]
pub(crate) struct ExplainArgs {
    /// The model: a safetensors file, a directory of shards, or an index.
    #[arg(value_name = "PATH")]
    pub(crate) model: PathBuf,
    /// Memory that a load would go to: auto (a GPU's, if there is one), host, cuda:N, or the memory that a PCI device
    /// publishes, such as pci:0000:03:00.0.
    #[arg(long, value_name = "DEVICE", default_value = "auto", value_parser = device)]
    pub(crate) device: Device,
    /// Path that the bytes would have to take: auto, direct, staged or cached.
    #[arg(long, value_name = "WAY", default_value = "auto", value_parser = policy)]
    pub(crate) path: PathPolicy,
    /// Measured rates that the choice of path follows, as `thruway bench --save-profile` writes them [default: none, or what
    /// THRUWAY_PROFILE names].
    #[arg(long, value_name = "FILE")]
    pub(crate) profile: Option<PathBuf>,
}

#[derive(Debug, ClapArgs)]
#[command(after_help = "\
The target appears at once and only when it is complete and durable. A file there is replaced; a directory must be
empty or not exist. A target that ends in a slash, or is an empty directory, becomes a directory: of a model of one
file it holds model.safetensors. Only weights are copied: config.json, tokenizers and the like are not.

Examples:
  thruway copy model.safetensors copy.safetensors
  thruway copy model/ resharded/ --max-shard-size 5GB
  thruway copy model/ /mnt/a/model/ --max-shard-size 5GB --stripe /mnt/b --stripe /mnt/c")]
pub(crate) struct CopyArgs {
    /// The model: a safetensors file, a directory of shards, or an index.
    #[arg(value_name = "SRC")]
    pub(crate) source: PathBuf,
    /// Where the copy goes: a file for a model of one file (a directory with a slash at the end), else a directory.
    #[arg(value_name = "DST")]
    pub(crate) target: PathBuf,
    /// Write a directory of shards of at most this many bytes each, such as 5GB; a larger tensor gets a shard of its own
    /// [default: as the source is].
    #[arg(long, value_name = "SIZE", value_parser = shard_size)]
    pub(crate) max_shard_size: Option<ByteSize>,
    /// Spread the shards over DST and this directory, best on another drive; may be given several times. DST then holds links
    /// to what lies there: remove both, or neither.
    #[arg(long, value_name = "DIR")]
    pub(crate) stripe: Vec<PathBuf>,
    /// Path by which the source is read: auto, direct, staged or cached. With direct the copy is written so too.
    #[arg(long, value_name = "WAY", default_value = "auto", value_parser = policy)]
    pub(crate) path: PathPolicy,
    /// Memory through which the bytes pass: host, or the memory that a PCI device publishes, such as pci:0000:03:00.0.
    #[arg(long, value_name = "DEVICE", default_value = "host", value_parser = copy_device)]
    pub(crate) device: Device,
}

#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Examples:
  thruway inspect model/
  thruway inspect model.safetensors --json")]
pub(crate) struct InspectArgs {
    /// The model: a safetensors file, a directory of shards, or an index.
    #[arg(value_name = "PATH")]
    pub(crate) model: PathBuf,
}

#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Memory use does not depend on the size of the models. Exit status 1 if they differ.

Examples:
  thruway verify model/
  thruway verify resharded/ --against model/")]
pub(crate) struct VerifyArgs {
    /// The model: a safetensors file, a directory of shards, or an index.
    #[arg(value_name = "PATH")]
    pub(crate) model: PathBuf,
    /// The model to compare with: names, dtypes, shapes and bytes, whatever the files.
    #[arg(long, value_name = "OTHER")]
    pub(crate) against: Option<PathBuf>,
    /// Path by which the bytes are read: auto, staged or cached.
    #[arg(long, value_name = "WAY", default_value = "auto", value_parser = policy)]
    pub(crate) path: PathPolicy,
}

#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Limits of drive and memory are the best run of each kind; those of the link to a GPU, and Thruway's figures, are medians.
A limit and what stands beside it are measured in runs of their own, so a ratio may exceed 1 by what the machine varies.
Run it on an idle machine.

Examples:
  thruway bench
  thruway bench --dir /mnt/nvme --size 16GB --repeat 5
  thruway bench --json > machine.json
  thruway bench --dir /mnt/nvme --save-profile rates.json
  THRUWAY_PROFILE=rates.json thruway load /mnt/nvme/model/")]
pub(crate) struct BenchArgs {
    /// Directory on the drive to measure. A subdirectory is made there and removed at the end.
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub(crate) dir: PathBuf,
    /// Bytes of the scratch files, such as 512MiB or 8GB; at least 1MB.
    #[arg(long, value_name = "SIZE", default_value = "1GB", value_parser = work_size)]
    pub(crate) size: ByteSize,
    /// Memory that Thruway loads to and saves from: auto (a GPU's, if there is one), host or cuda:N.
    #[arg(long, value_name = "DEVICE", default_value = "auto", value_parser = device)]
    pub(crate) device: Device,
    /// Runs of each measurement, 1 to 100.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub(crate) repeat: u32,
    /// Measure each path between the GPU and this drive too, for files of 1, 16 and 256 MiB (up to --size), and write the rates
    /// to this file, which THRUWAY_PROFILE and --profile of other commands name. What it says of other GPUs and drives stays.
    #[arg(long, value_name = "FILE")]
    pub(crate) save_profile: Option<PathBuf>,
}

/// Reads a command line, the program's name first.
///
/// # Errors
/// What clap says: a mistake, or a request for help or the version.
pub(crate) fn parse(arguments: &[OsString]) -> Result<Args, clap::Error> {
    Args::try_parse_from(arguments)
}

/// Whether JSON was asked for, of a command line that cannot be parsed.
pub(crate) fn wants_json(mut args: impl Iterator<Item = OsString>) -> bool {
    args.by_ref().take_while(|arg| arg != OsStr::new("--")).any(|arg| arg == OsStr::new("--json"))
}

fn device(text: &str) -> Result<Device, String> {
    text.parse().map_err(|error| in_one_line(&error))
}

/// A copy gains nothing by a GPU, and one that has a copy engine of its own is left alone.
fn copy_device(text: &str) -> Result<Device, String> {
    match device(text)? {
        Device::Auto | Device::Cuda(_) => Err("a copy passes through the host, or through a PCI device".to_owned()),
        other => Ok(other),
    }
}

fn policy(text: &str) -> Result<PathPolicy, String> {
    text.parse().map_err(|error| in_one_line(&error))
}

fn shard_size(text: &str) -> Result<ByteSize, String> {
    sized(text, ByteSize(1))
}

fn work_size(text: &str) -> Result<ByteSize, String> {
    sized(text, ByteSize(1_000_000))
}

fn sized(text: &str, least: ByteSize) -> Result<ByteSize, String> {
    let size: ByteSize = text.parse().map_err(|error| in_one_line(&error))?;
    if size < least { Err(format!("the least is {least}")) } else { Ok(size) }
}

/// clap shows one text: the message and what to do about it.
fn in_one_line(error: &Error) -> String {
    match error.hint() {
        Some(hint) => format!("{error}: {hint}"),
        None => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_definition_is_sound() {
        Args::command().debug_assert();
    }

    #[test]
    fn every_command_and_option_is_explained() {
        fn check(command: &clap::Command) {
            assert!(command.get_about().is_some(), "{}", command.get_name());
            for arg in command.get_arguments() {
                assert!(arg.get_help().is_some(), "{} {}", command.get_name(), arg.get_id());
            }
            command.get_subcommands().for_each(check);
        }
        Args::command().get_subcommands().for_each(check);
    }

    #[test]
    fn json_is_recognised_before_the_end_of_the_options_only() {
        let wants = |args: &[&str]| wants_json(args.iter().map(OsString::from));
        assert!(wants(&["thruway", "--json", "load"]));
        assert!(!wants(&["thruway", "load", "--", "--json"]));
    }
}
