//! Locks and condition variables.

use std::ops::{Deref, DerefMut};
use std::time::{Duration, Instant};

use super::world::{self, Key};

/// A mutual exclusion lock without poisoning, like that of `parking_lot`.
#[derive(Debug, Default)]
pub struct Mutex<T>(parking_lot::Mutex<T>);

/// Holds a [`Mutex`]'s lock until it is dropped.
pub struct MutexGuard<'a, T> {
    // Dropped before `released`.
    held: parking_lot::MutexGuard<'a, T>,
    released: Released,
}

/// Wakes the simulated threads that wait for a lock, when dropped.
struct Released(Key);

impl<T> Mutex<T> {
    /// Creates an unlocked mutex.
    pub const fn new(value: T) -> Self {
        Self(parking_lot::Mutex::new(value))
    }

    /// Blocks until the lock is free, and takes it.
    #[inline]
    #[track_caller]
    pub fn lock(&self) -> MutexGuard<'_, T> {
        let held = match world::me() {
            None => self.0.lock(),
            Some(me) => {
                me.pause();
                let held = loop {
                    if let Some(held) = self.0.try_lock() {
                        break held;
                    }
                    me.wait(self.key(), None);
                };
                me.has_locked();
                held
            }
        };

        MutexGuard {
            held,
            released: Released(self.key()),
        }
    }

    /// Takes the lock if it is free. Returns `None`, without waiting, if it is not.
    #[inline]
    #[track_caller]
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        let me = world::me();
        me.iter().for_each(world::WorldMember::pause);
        let held = self.0.try_lock()?;
        me.iter().for_each(world::WorldMember::has_locked);
        Some(MutexGuard {
            held,
            released: Released(self.key()),
        })
    }

    /// Returns a reference to the value. Needs no lock, because `&mut self` is exclusive.
    pub fn get_mut(&mut self) -> &mut T {
        self.0.get_mut()
    }

    /// Returns the value.
    pub fn into_inner(self) -> T {
        self.0.into_inner()
    }

    fn key(&self) -> Key {
        std::ptr::from_ref(self).addr()
    }
}

impl<T> MutexGuard<'_, T> {
    /// Releases the lock, calls `f`, and takes the lock again.
    pub fn unlocked<R>(guard: &mut Self, f: impl FnOnce() -> R) -> R {
        let mutex = parking_lot::MutexGuard::mutex(&guard.held);
        let key = guard.released.0;
        parking_lot::MutexGuard::unlocked(&mut guard.held, || {
            let Some(me) = world::me() else { return f() };
            me.has_unlocked(key);

            let result = f();
            // No other thread runs between the last look and the lock.
            while mutex.is_locked() {
                me.wait(key, None);
            }
            me.has_locked();
            result
        })
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.held
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.held
    }
}

impl Drop for Released {
    #[inline]
    fn drop(&mut self) {
        if let Some(me) = world::me() {
            me.has_unlocked(self.0);
        }
    }
}

/// A condition variable, like that of `parking_lot`.
#[derive(Debug, Default)]
pub struct Condvar(parking_lot::Condvar);

/// The result of a wait with a deadline.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct WaitTimeoutResult(bool);

impl WaitTimeoutResult {
    /// Returns true if the wait ended at its deadline.
    pub fn timed_out(self) -> bool {
        self.0
    }
}

impl Condvar {
    /// Creates a condition variable.
    pub const fn new() -> Self {
        Self(parking_lot::Condvar::new())
    }

    /// Releases the lock, blocks until a notification, and takes the lock again. May return without
    /// a notification.
    pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        match world::me() {
            None => self.0.wait(&mut guard.held),
            Some(me) => _ = self.simulate(&me, guard, None),
        }
    }

    /// Same as [`wait`](Self::wait), but ends at `deadline` at the latest.
    pub fn wait_until<T>(
        &self,
        guard: &mut MutexGuard<'_, T>,
        deadline: Instant,
    ) -> WaitTimeoutResult {
        WaitTimeoutResult(match world::me() {
            None => self.0.wait_until(&mut guard.held, deadline).timed_out(),
            Some(me) => !self.simulate(&me, guard, Some(deadline)),
        })
    }

    /// Same as [`wait`](Self::wait), but ends after `time` at the latest.
    pub fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, time: Duration) -> WaitTimeoutResult {
        match world::me() {
            None => WaitTimeoutResult(self.0.wait_for(&mut guard.held, time).timed_out()),
            Some(me) => WaitTimeoutResult(!self.simulate(&me, guard, me.after(time))),
        }
    }

    /// Wakes one waiting thread, if there is one.
    #[track_caller]
    pub fn notify_one(&self) {
        match world::me() {
            None => _ = self.0.notify_one(),
            Some(me) => {
                me.wake_one(self.key());
                me.pause();
            }
        }
    }

    /// Wakes all waiting threads.
    #[track_caller]
    pub fn notify_all(&self) {
        match world::me() {
            None => _ = self.0.notify_all(),
            Some(me) => {
                me.wake_all(self.key());
                me.pause();
            }
        }
    }

    /// Waits as a thread of a simulated world. Returns false if the wait ended at `deadline`.
    fn simulate<T>(
        &self,
        me: &world::WorldMember,
        guard: &mut MutexGuard<'_, T>,
        deadline: Option<Instant>,
    ) -> bool {
        MutexGuard::unlocked(guard, || me.wait(self.key(), deadline))
    }

    fn key(&self) -> Key {
        std::ptr::from_ref(self).addr()
    }
}
