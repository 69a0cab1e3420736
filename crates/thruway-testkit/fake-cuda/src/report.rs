//! The state in JSON.

use serde_json::{Value, json};

use crate::stream::Work;
use crate::world::World;

impl World {
    /// What is alive, what is in flight, what went wrong, and how often each function was called.
    pub(crate) fn report(&self) -> Value {
        let devices = self.arenas.iter().zip(&self.contexts).enumerate().map(|(ordinal, (arena, context))| {
            json!({
                "ordinal": ordinal,
                "live_allocations": arena.count(),
                "live_bytes": arena.live_bytes(),
                "peak_bytes": arena.peak,
                "context_references": context.references,
                "sticky_error": context.sticky.map(|code| code.0),
            })
        });
        let in_flight = self.streams.values().flat_map(|stream| &stream.queue);
        let (mut operations, mut copies) = (0usize, 0usize);
        for op in in_flight {
            operations += 1;
            copies += usize::from(matches!(op.work, Work::Copies(_)));
        }
        let faults: Vec<Value> =
            self.faults.iter().map(|fault| json!({ "kind": fault.kind.name(), "detail": fault.detail })).collect();
        let calls: serde_json::Map<String, Value> =
            self.calls.iter().map(|(symbol, count)| (symbol.to_owned(), count.into())).collect();
        json!({
            "initialised": self.initialised,
            "devices": devices.collect::<Vec<Value>>(),
            "live_allocations": self.arenas.iter().map(|arena| arena.count()).sum::<usize>(),
            "live_bytes": self.arenas.iter().map(|arena| arena.live_bytes()).sum::<usize>(),
            "pinned_ranges": self.pinned.count(),
            "pinned_bytes": self.pinned.bytes(),
            "pinned_peak_bytes": self.pinned.peak,
            "live_streams": self.streams.values().filter(|stream| !stream.legacy && !stream.destroyed).count(),
            "live_events": self.events.len(),
            "live_modules": self.modules.len(),
            "in_flight_operations": operations,
            "in_flight_copies": copies,
            "copies": self.totals.copies,
            "pageable_copies": self.totals.pageable_copies,
            "host_to_device_bytes": self.totals.host_to_device_bytes,
            "device_to_host_bytes": self.totals.device_to_host_bytes,
            "device_to_device_bytes": self.totals.device_to_device_bytes,
            "fill_bytes": self.totals.fill_bytes,
            "faults": faults,
            "calls": calls,
        })
    }
}
