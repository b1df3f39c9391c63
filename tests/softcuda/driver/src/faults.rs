//! Failures on demand: the n-th call of a kind fails, as the environment or a test requests.

use std::ffi::{CStr, c_char};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{LazyLock, Once};

use parking_lot::Mutex;

use crate::error::{Code, Result};
use crate::settings::{CallKind, Plan, plan, settings};

static PLAN: LazyLock<Mutex<Plan>> = LazyLock::new(|| Mutex::new(settings().fail.clone()));
/// True if a failure was ever requested. Otherwise calls need not lock `PLAN`.
static PLANNED: LazyLock<AtomicBool> =
    LazyLock::new(|| AtomicBool::new(!settings().fail.is_empty()));

/// Counts a call of a kind. If a failure is requested for this call, prints a message and fails.
/// Each request makes one call fail.
///
/// # Errors
///
/// `CUDA_ERROR_ILLEGAL_ADDRESS` for a copy or launch. `CUDA_ERROR_OUT_OF_MEMORY` for allocations,
/// events and streams. A function fails with the requested code, or with a code that suits its
/// name.
pub(crate) fn meet(kind: CallKind) -> Result {
    if !PLANNED.load(Ordering::Relaxed) {
        return Ok(());
    }

    let Some(kind) = next(&kind) else {
        return Ok(());
    };

    eprintln!("softcuda: {kind:?} fails, as the test requested");
    Err(match kind {
        CallKind::Answer(_, code) => Code(code),
        CallKind::Copy | CallKind::Launch => Code::ILLEGAL_ADDRESS,
        CallKind::Alloc | CallKind::AllocHost | CallKind::Event | CallKind::Stream => {
            Code::OUT_OF_MEMORY
        }
        CallKind::Function(name) if name.contains("Ipc") => Code::MAP_FAILED,
        CallKind::Function(name) if name.contains("Alloc") => Code::OUT_OF_MEMORY,
        CallKind::Compile | CallKind::Function(_) => Code::UNKNOWN,
    })
}

/// A kind of work that is slow at its first use in a process.
#[derive(Clone, Copy)]
pub(crate) enum First {
    Context,
    Alloc,
    Compile,
    Product,
}

/// Sleeps for the time `SOFTCUDA_FIRST` if this is the process's first call with this kind. Other
/// calls with it wait for the end of the sleep.
pub(crate) fn first(kind: First) {
    static ONCE: [Once; 4] = [const { Once::new() }; 4];
    ONCE[kind as usize].call_once(|| std::thread::sleep(settings().first));
}

/// Counts a call of the exported function `name`, and fails if a test has requested a failure for
/// it. See [`meet`].
pub(crate) fn meet_call(name: &str) -> Result {
    if PLANNED.load(Ordering::Relaxed) {
        meet(CallKind::Function(name.to_owned()))
    } else {
        Ok(())
    }
}

/// Counts a call of a kind in the plan. Returns the requested failure and removes it from the plan
/// if this call must fail; otherwise returns `None`.
fn next(kind: &CallKind) -> Option<CallKind> {
    let mut met = None;
    PLAN.lock().retain_mut(|(planned, left)| {
        let is_it = match (&*planned, kind) {
            (CallKind::Answer(name, _), CallKind::Function(called)) => name == called,
            (planned, kind) => planned == kind,
        };

        if !is_it {
            return true;
        }
        *left -= 1;
        if *left == 0 {
            met = Some(planned.clone());
        }
        *left > 0
    });
    met
}

/// Makes the n-th call of a kind from now on fail; 1 is the next call. Returns 0, or 1 with a
/// message on standard error if the kind is unknown or `nth` is 0.
///
/// # Safety
///
/// The first argument is a zero-terminated string.
#[unsafe(no_mangle)]
unsafe extern "C" fn softcuda_fail(kind: *const c_char, nth: u64) -> i32 {
    // SAFETY: see above.
    let kind = unsafe { CStr::from_ptr(kind) }.to_string_lossy();
    match plan(&format!("{kind}:{nth}")) {
        Ok(more) => {
            PLAN.lock().extend(more);
            PLANNED.store(true, Ordering::Relaxed);
            0
        }
        Err(why) => {
            eprintln!("softcuda: {why}");
            1
        }
    }
}
