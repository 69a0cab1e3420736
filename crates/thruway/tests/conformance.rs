//! The engine contract, kept by every engine under every layer.

use thruway::io::Engine;
use thruway::io::engine::{InMemory, Posix, Uring};
use thruway_testkit::conformance::{Layering, OsFiles, SimFiles, run};
use thruway_testkit::fixtures::skips_are_failures;

fn posix(lanes: usize, layering: Layering) {
    run(&|| Box::new(Posix::new(lanes)), &OsFiles::new(), layering);
}

/// Does nothing but say why where the kernel refuses io_uring, unless the environment forbids skipping.
fn uring(depth: u32, layering: Layering) {
    if let Err(refused) = Uring::new(depth) {
        assert!(!skips_are_failures(), "io_uring must be checked here: {refused}");
        println!("skipped: {refused}");
        return;
    }
    let make = || -> Box<dyn Engine> { Box::new(Uring::new(depth).expect("it was allowed a moment ago")) };
    run(&make, &OsFiles::new(), layering);
}

fn inmemory(depth: usize, layering: Layering) {
    run(&|| Box::new(InMemory::new(depth, 42)), &SimFiles::default(), layering);
}

/// One test for each layering, so that they run beside each other and are named in reports.
macro_rules! under_every_layer {
    ($($module:ident: $subject:expr;)+) => {
        $(mod $module {
            use super::*;

            #[test]
            fn keeps_the_contract_bare() {
                $subject(Layering::Bare);
            }

            #[test]
            fn keeps_the_contract_under_exact() {
                $subject(Layering::Exact);
            }

            #[test]
            fn keeps_the_contract_under_monitored() {
                $subject(Layering::Monitored);
            }

            #[test]
            fn keeps_the_contract_under_faulty_without_faults() {
                $subject(Layering::Faulty);
            }

            #[test]
            fn keeps_the_contract_in_the_stack_of_the_pool() {
                $subject(Layering::Stack);
            }
        })+
    };
}

under_every_layer! {
    posix_alone_or_beside_others: |layering| posix(4, layering);
    uring_with_thirty_two_in_flight: |layering| uring(32, layering);
    uring_with_an_odd_depth: |layering| uring(3, layering);
    inmemory_out_of_order: |layering| inmemory(8, layering);
}

#[test]
fn a_depth_of_zero_is_one() {
    assert_eq!(Posix::new(0).capabilities().lanes, 1, "at least one");
    assert_eq!(InMemory::new(0, 1).capabilities().depth, 1);
    if let Ok(engine) = Uring::new(0) {
        assert_eq!(engine.capabilities().depth, 1);
    }
}
