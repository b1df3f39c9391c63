//! Threads.

use std::cell::RefCell;
use std::io;
use std::time::Duration;

pub use std::thread::{ThreadId, current, panicking};

use super::world::{self, WorldMember};

/// A builder of threads, which gives them a name.
#[derive(Debug, Default)]
pub struct Builder {
    name: Option<String>,
}

/// A handle to a thread, by which a caller waits for its end.
pub struct JoinHandle<T> {
    real: std::thread::JoinHandle<T>,
    simulated: Option<WorldMember>,
}

/// The result of a thread; the error is its panic.
pub type Result<T> = std::thread::Result<T>;

impl Builder {
    /// Creates a builder of threads without a name.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the thread's name.
    pub fn name(mut self, name: String) -> Self {
        self.name = Some(name);
        self
    }

    /// Starts a thread that runs `f`.
    ///
    /// # Errors
    ///
    /// If the system cannot start a thread.
    pub fn spawn<F, T>(self, f: F) -> io::Result<JoinHandle<T>>
    where
        F: FnOnce() -> T + Send + 'static,
        T: Send + 'static,
    {
        let name = self.name.unwrap_or_default();
        let (simulated, f) = of_world(&name, f);
        let real = std::thread::Builder::new().name(name).spawn(f);
        // Without the thread, the world would wait for it forever.
        let real = real.inspect_err(|_| simulated.iter().for_each(WorldMember::never_starts))?;
        Ok(JoinHandle { real, simulated })
    }
}

/// Registers a new thread in the caller's simulated world, if there is one. Returns it, with `f`
/// wrapped to run as that thread.
fn of_world<T, F: FnOnce() -> T>(
    name: &str,
    f: F,
) -> (Option<WorldMember>, impl FnOnce() -> T + use<T, F>) {
    let simulated = world::me().map(|me| me.add(name));
    let child = simulated.clone();
    let action = move || {
        let _entered = child.map(WorldMember::enter);
        f()
    };
    (simulated, action)
}

/// Starts a thread that runs `f`.
///
/// # Panics
///
/// If the system cannot start a thread.
pub fn spawn<F, T>(f: F) -> JoinHandle<T>
where
    F: FnOnce() -> T + Send + 'static,
    T: Send + 'static,
{
    Builder::new().spawn(f).expect("the system gives a thread")
}

impl<T> JoinHandle<T> {
    /// Blocks until the thread has ended, and returns its result.
    ///
    /// # Errors
    ///
    /// The thread's panic, if it panicked.
    pub fn join(self) -> Result<T> {
        join_simulated(self.simulated.as_ref());
        self.real.join()
    }

    /// Returns true once the thread's function has returned.
    pub fn is_finished(&self) -> bool {
        match &self.simulated {
            Some(thread) => thread.has_ended(),
            None => self.real.is_finished(),
        }
    }
}

/// Returns the number of cores that this process may use. In a simulated world it is always 2.
pub fn available_parallelism() -> usize {
    if super::is_simulated() {
        return 2;
    }
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Waits until a simulated thread has ended. Does nothing for `None`.
fn join_simulated(thread: Option<&WorldMember>) {
    if let (Some(thread), Some(me)) = (thread, world::me()) {
        thread.join(&me);
    }
}

/// A scope for threads that may borrow from the function that starts them.
pub struct Scope<'scope, 'env> {
    real: &'scope std::thread::Scope<'scope, 'env>,
    simulated: RefCell<Vec<WorldMember>>,
}

/// A handle to a thread of a [`Scope`].
pub struct ScopedJoinHandle<'scope, T> {
    real: std::thread::ScopedJoinHandle<'scope, T>,
    simulated: Option<WorldMember>,
}

/// Calls `f`, then waits until all threads that `f` has started in the scope have ended.
pub fn scope<'env, F, T>(f: F) -> T
where
    F: for<'scope> FnOnce(&Scope<'scope, 'env>) -> T,
{
    std::thread::scope(|real| {
        // The real scope would wait without letting the threads run.
        let scope = JoinsAll(Scope {
            real,
            simulated: RefCell::default(),
        });
        f(&scope.0)
    })
}

/// Waits for all simulated threads of a scope, when dropped.
struct JoinsAll<'scope, 'env>(Scope<'scope, 'env>);

impl Drop for JoinsAll<'_, '_> {
    fn drop(&mut self) {
        self.0
            .simulated
            .borrow()
            .iter()
            .for_each(|thread| join_simulated(Some(thread)));
    }
}

impl<'scope> Scope<'scope, '_> {
    /// Starts a thread that runs `f`.
    ///
    /// # Panics
    ///
    /// If the system cannot start a thread.
    pub fn spawn<F, T>(&self, f: F) -> ScopedJoinHandle<'scope, T>
    where
        F: FnOnce() -> T + Send + 'scope,
        T: Send + 'scope,
    {
        let (simulated, f) = of_world("", f);
        self.simulated.borrow_mut().extend(simulated.clone());
        ScopedJoinHandle {
            real: self.real.spawn(f),
            simulated,
        }
    }
}

impl<T> ScopedJoinHandle<'_, T> {
    /// Blocks until the thread has ended, and returns its result.
    ///
    /// # Errors
    ///
    /// The thread's panic, if it panicked.
    pub fn join(self) -> Result<T> {
        join_simulated(self.simulated.as_ref());
        self.real.join()
    }
}

/// Blocks the calling thread for `time`.
pub fn sleep(time: Duration) {
    match world::me() {
        None => std::thread::sleep(time),
        Some(me) => {
            // Nothing has the address of a value on this stack.
            let until = me.after(time);
            let key = std::ptr::from_ref(&until).addr();
            while me.wait(key, until) {}
        }
    }
}

/// Lets another thread run.
pub fn yield_now() {
    match world::me() {
        None => std::thread::yield_now(),
        Some(me) => me.give_way(),
    }
}
