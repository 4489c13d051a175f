//! One method call for each action.

use std::time::Duration;

use super::pools::pool_id;
use super::{Futures, World};
use crate::testing::Action;

impl World {
    /// Runs an action, or skips it if a program may not do it at this moment.
    pub(super) fn act(&mut self, action: &Action, futures: &mut Futures<'_>) {
        match *action {
            Action::Alloc { size, stream } => self.alloc(size, self.stream(stream)),
            Action::AllocAtOnce { size, stream } => self.alloc_at_once(size, self.stream(stream)),
            Action::Future { size, stream } => self.ask_future(size, self.stream(stream), futures),
            Action::PollFuture { index } => self.poll_future(index, futures),
            Action::DropFuture { index } => futures.drop_one(index),
            Action::Free { index } => self.free_one(index),
            Action::Repeat { kind, stream, times } => self.repeat(kind, self.stream(stream), times),
            Action::UseOn { index, stream } => self.use_on(index, self.stream(stream)),
            Action::Finish { stream } => self.sim.finish(self.stream(stream)),
            Action::FinishOldest => drop(self.sim.finish_oldest()),
            Action::FinishAll => self.sim.finish_all(),
            Action::ProcessEvents => self.process_events(),
            Action::EmptyCache => self.empty_cache(),
            Action::EmptyPool { pool } => self.empty_pool(pool_id(pool)),
            Action::BeginPool { pool, stream } => {
                self.begin_own_pool(pool_id(pool), stream.map(|stream| self.stream(stream)));
            }
            Action::EndPool { pool } => self.end_pool(pool_id(pool)),
            Action::ReleasePool { pool } => self.release_pool(pool_id(pool)),
            Action::UseOnOom { pool, allow } => self.use_on_oom(pool_id(pool), allow),
            Action::NoSplit { pool } => self.set_no_split(pool_id(pool)),
            Action::BeginCapture { pool, stream } => {
                self.begin_capture(pool_id(pool), self.stream(stream));
            }
            Action::JoinCapture { stream } => self.join_capture(self.stream(stream)),
            Action::FollowStream { stream } => self.follow_stream(self.stream(stream)),
            Action::EndCapture => self.end_capture(),
            Action::Graph { pool, stream, kind } => {
                self.graph(pool_id(pool), self.stream(stream), kind);
            }
            Action::Replay { pool, stream } => self.replay(pool_id(pool), self.stream(stream)),
            Action::BeginSilentCapture { stream } => self.begin_silent_capture(self.stream(stream)),
            Action::EndSilentCapture => self.end_silent_capture(),
            Action::ReplayMeanwhile { pool, stream } => {
                self.replay_meanwhile(pool_id(pool), self.stream(stream));
            }
            Action::FreeMeanwhile { index } => self.free_meanwhile(index),
            Action::DestroyStream { stream } => self.destroy_stream(stream, futures),
            Action::Lasting { which } => self.set_lasting(which),
            Action::SetTenant { tenant, bytes } => self.set_tenant(tenant, bytes),
            Action::SetLimit { bytes } => self.set_limit(bytes),
            Action::SetFraction { percent } => self.set_fraction(percent),
            Action::SetPolicy { policy } => self.set_policy(policy),
            Action::Configure { conf } => self.configure(conf),
            Action::Fail { call, nth, out_of_memory } => self.fail(call, nth, out_of_memory),
            Action::FreeUnknown { address } => self.free_unknown(address),
            Action::RecordUnknown { address } => self.record_unknown(address),
            Action::Ask { index } => self.ask(index),
            Action::Snapshot => self.check_snapshot(),
            Action::ResetStats => self.reset_stats(),
            Action::Inject { rules } => self.inject(rules),
            Action::Trim => self.trim(Duration::from_secs(1)),
            Action::TrimAfter { ms } => self.trim(Duration::from_millis(ms.into())),
            Action::Prefetch { size, stream } => self.prefetch(size, self.stream(stream)),
        }
    }
}
