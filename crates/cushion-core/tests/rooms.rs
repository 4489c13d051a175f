//! The rooms of the engine, and which of them call the driver.

#[cfg(test)]
#[path = "../../../tests/rooms/rooms.rs"]
mod rooms;

#[cfg(test)]
mod tests {
    use crate::rooms::{Rooms, code};

    const ROOMS: Rooms<'_> = Rooms {
        of: env!("CARGO_MANIFEST_DIR"),
        order: &[
            "engine", "shortage", "core", "demand", "policy", "memory", "backing", "streams",
            "heap", "ledger", "outcome", "options", "driver", "base",
        ],
        free: &["testing"],
    };

    #[test]
    fn rooms_use_only_those_below_them() {
        ROOMS.check();
    }

    #[test]
    fn an_arrow_that_points_up_is_found() {
        let wrong = |code: &str| ROOMS.wrongly_used("heap", code);
        assert_eq!(wrong("use crate::ledger::stats;\nuse crate::heap::block;"), [""; 0]);
        assert_eq!(wrong("use crate::backing::Backing;"), ["backing"]);
        assert_eq!(wrong("    crate::core::ring();"), ["core"]);
        let group = "use crate::{\n    base::{size, table},\n    engine::Engine,\n    Options,\n};";
        assert_eq!(wrong(group), ["engine", "Options"]);
    }

    /// Only the backing makes the driver's memory calls, and only the streams wait for work.
    #[test]
    fn only_their_rooms_call_the_driver() {
        const MEMORY: [&str; 11] = [
            "alloc",
            "free",
            "reserve",
            "unreserve",
            "create",
            "create_host",
            "release",
            "map",
            "unmap",
            "set_access",
            "memory_info",
        ];
        const WORK: [&str; 5] = [
            "event_create",
            "event_record",
            "event_query",
            "event_synchronize",
            "stream_synchronize",
        ];
        let mut wrong = Vec::new();
        for (room, path) in ROOMS.files() {
            if room == "driver" || room == "testing" {
                continue;
            }
            let code = code(&path);
            let calls = |call: &&&str| code.contains(&format!("driver.{call}("));
            let not_its_own = |owner: &str, all: &[&str]| -> Vec<String> {
                let called = all.iter().filter(|_| room != owner).filter(calls);
                called.map(|call| format!("{} calls {call}", path.display())).collect()
            };
            wrong.extend(not_its_own("backing", &MEMORY));
            wrong.extend(not_its_own("streams", &WORK));
        }
        assert!(wrong.is_empty(), "{wrong:?}");
    }
}
