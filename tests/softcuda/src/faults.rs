//! Failures on demand: the n-th call of a kind fails, as the environment or a test requests.

use std::ffi::{CStr, c_char};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use crate::error::{Code, Result};
use crate::settings::settings;

/// A kind of operation that can be made to fail.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum What {
    /// An allocation of device memory, by `cuMemAlloc` or `cuMemAllocAsync`.
    Alloc,
    /// An allocation of pinned host memory.
    AllocHost,
    /// A copy or a fill, when it runs.
    Copy,
    /// A kernel, a matrix product or a collective, when it runs.
    Launch,
    /// The creation of an event.
    Event,
    /// The creation of a stream.
    Stream,
    /// A compilation by NVRTC.
    Compile,
    /// A call of a function, by its C name.
    Function(String),
    /// A call of a function, by its C name, that returns this code.
    Answer(String, u32),
}

/// The requested failures: each kind, and the number of calls until it fails.
type Plan = Vec<(What, u64)>;

static PLAN: LazyLock<Mutex<Plan>> = LazyLock::new(|| Mutex::new(settings().fail.clone()));
/// True if any failure was ever requested, so that calls are fast otherwise.
static PLANNED: LazyLock<AtomicBool> =
    LazyLock::new(|| AtomicBool::new(!settings().fail.is_empty()));

/// Parses `kind:nth`, several separated by commas.
///
/// # Errors
///
/// A message for the user that quotes the wrong part.
pub(crate) fn plan(text: &str) -> std::result::Result<Plan, String> {
    let one = |part: &str| {
        let (what, nth) = part.split_once(':')?;
        let what = match what {
            "alloc" => What::Alloc,
            "alloc_host" => What::AllocHost,
            "copy" => What::Copy,
            "launch" => What::Launch,
            "event" => What::Event,
            "stream" => What::Stream,
            "compile" => What::Compile,
            name if ["cu", "nvrtc", "nccl"].iter().any(|library| name.starts_with(library)) => {
                match name.split_once('=') {
                    Some((name, code)) => What::Answer(name.to_owned(), code.parse().ok()?),
                    None => What::Function(name.to_owned()),
                }
            }
            _ => return None,
        };
        nth.parse().ok().filter(|nth| *nth > 0).map(|nth| (what, nth))
    };
    let known = "alloc, alloc_host, copy, launch, event, stream, compile or a function of CUDA's";
    let parts = text.split(',').filter(|part| !part.is_empty());
    parts
        .map(|part| {
            one(part).ok_or_else(|| format!("SOFTCUDA_FAIL: {part:?} is not <{known}>:<nth>"))
        })
        .collect()
}

/// Counts a call of a kind, and fails if a failure is requested for it.
///
/// # Errors
///
/// `CUDA_ERROR_ILLEGAL_ADDRESS` for a copy or launch. `CUDA_ERROR_OUT_OF_MEMORY` for allocations,
/// events and streams. A function fails with the requested code, or with one that suits its name.
pub(crate) fn meet(what: What) -> Result {
    if !PLANNED.load(Ordering::Relaxed) {
        return Ok(());
    }
    let Some(what) = next(&what) else { return Ok(()) };
    eprintln!("softcuda: {what:?} fails, as the test requested");
    Err(match what {
        What::Answer(_, code) => Code(code),
        What::Copy | What::Launch => Code::ILLEGAL_ADDRESS,
        What::Alloc | What::AllocHost | What::Event | What::Stream => Code::OUT_OF_MEMORY,
        What::Function(name) if name.contains("Ipc") => Code::MAP_FAILED,
        What::Function(name) if name.contains("Alloc") => Code::OUT_OF_MEMORY,
        What::Compile | What::Function(_) => Code::UNKNOWN,
    })
}

/// Does as [`meet`] for a call of an exported function.
pub(crate) fn meet_call(name: &str) -> Result {
    if PLANNED.load(Ordering::Relaxed) { meet(What::Function(name.to_owned())) } else { Ok(()) }
}

/// Counts a call of a kind; returns the requested failure if this call must fail.
fn next(what: &What) -> Option<What> {
    let mut met = None;
    PLAN.lock().retain_mut(|(planned, left)| {
        let is_it = match (&*planned, what) {
            (What::Answer(name, _), What::Function(called)) => name == called,
            (planned, what) => planned == what,
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

/// Makes the n-th call of a kind from now on fail. Returns 0, or 1 if the kind is unknown or `nth`
/// is 0.
///
/// # Safety
///
/// The first argument is a zero-terminated string.
#[unsafe(no_mangle)]
unsafe extern "C" fn softcuda_fail(what: *const c_char, nth: u64) -> i32 {
    // SAFETY: see above.
    let what = unsafe { CStr::from_ptr(what) }.to_string_lossy();
    match plan(&format!("{what}:{nth}")) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fault_plans_parse_or_name_error() {
        assert_eq!(
            plan("launch:3,alloc_host:1"),
            Ok(vec![(What::Launch, 3), (What::AllocHost, 1)])
        );
        assert_eq!(plan(""), Ok(Vec::new()));
        let function = What::Function("cuInit".into());
        assert_eq!(plan("cuInit:1"), Ok(vec![(function, 1)]));
        let answer = What::Answer("cuInit".into(), 4242);
        assert_eq!(plan("cuInit=4242:2"), Ok(vec![(answer, 2)]));
        assert!(plan("cuInit=x:2").is_err());
        assert!(plan("launch").unwrap_err().contains("launch"));
        assert!(plan("lunch:1").is_err() && plan("copy:0").is_err());
    }
}
