//! Options of the calls that move arrays.

/// Options of [`Program::device_put_with`](crate::Program::device_put_with) and
/// [`Program::reshard`](crate::Program::reshard) for memory and plans.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct MoveOptions {
    /// True to donate the source arrays. All clones of a donated array become unusable, and its
    /// memory is freed as soon as no operation needs it. Off by default.
    pub donate: bool,
    /// True to let the result share memory with the source. On by default. This is safe, since
    /// arrays never change.
    pub may_alias: bool,
    /// True to look up plans in the plan cache and store new ones in it. On by default. Turn it off
    /// for arrays that are moved only once.
    pub cache_plans: bool,
}

impl Default for MoveOptions {
    fn default() -> Self {
        Self {
            donate: false,
            may_alias: true,
            cache_plans: true,
        }
    }
}

impl MoveOptions {
    /// Sets [`MoveOptions::donate`].
    #[must_use]
    pub fn donate(mut self, donate: bool) -> Self {
        self.donate = donate;
        self
    }

    /// Sets [`MoveOptions::may_alias`].
    #[must_use]
    pub fn may_alias(mut self, may_alias: bool) -> Self {
        self.may_alias = may_alias;
        self
    }

    /// Sets [`MoveOptions::cache_plans`].
    #[must_use]
    pub fn cache_plans(mut self, cache_plans: bool) -> Self {
        self.cache_plans = cache_plans;
        self
    }
}
