//! The folders of this crate use only those below them.

#[cfg(test)]
#[path = "../../../tests/rooms/rooms.rs"]
#[allow(dead_code, reason = "the engine's test uses all of it")]
mod rooms;

#[cfg(test)]
mod tests {
    use crate::rooms::Rooms;

    #[test]
    fn folders_use_only_those_below_them() {
        let order = &["infer", "replay", "program", "write", "read", "format", "model"];
        Rooms { of: env!("CARGO_MANIFEST_DIR"), order, free: &["testing"] }.check();
    }
}
