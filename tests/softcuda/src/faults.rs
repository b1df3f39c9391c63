//! Failures on demand: the n-th of a kind of call, named by the environment or by a test.

use std::ffi::{CStr, c_char};
use std::sync::LazyLock;

use parking_lot::Mutex;

use crate::error::{Code, Result};
use crate::settings::settings;

/// What can be made to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum What {
    /// `cuInit`.
    Init,
    /// Device memory, of either kind.
    Alloc,
    /// Pinned host memory.
    AllocHost,
    /// A copy or a fill, as it is done.
    Copy,
    /// A kernel or a product of matrices, as it runs.
    Launch,
    /// A new event.
    Event,
    /// A new stream.
    Stream,
    /// Memory of another process.
    IpcOpen,
    /// NVRTC.
    Compile,
}

const NAMES: [(&str, What); 9] = [
    ("init", What::Init),
    ("alloc", What::Alloc),
    ("alloc_host", What::AllocHost),
    ("copy", What::Copy),
    ("launch", What::Launch),
    ("event", What::Event),
    ("stream", What::Stream),
    ("ipc_open", What::IpcOpen),
    ("compile", What::Compile),
];

/// What is to fail, and at which time from now.
type Plan = Vec<(What, u64)>;

static PLAN: LazyLock<Mutex<Plan>> = LazyLock::new(|| Mutex::new(settings().fail.clone()));

/// Reads `what:nth`, several with commas between.
///
/// # Errors
///
/// What is wrong, in words.
pub(crate) fn plan(text: &str) -> std::result::Result<Plan, String> {
    let one = |part: &str| {
        let (what, nth) = part.split_once(':')?;
        let what = NAMES.iter().find(|(name, _)| *name == what)?.1;
        nth.parse().ok().filter(|nth| *nth > 0).map(|nth| (what, nth))
    };
    let parts = text.split(',').filter(|part| !part.is_empty());
    parts
        .map(|part| {
            let known = NAMES.map(|(name, _)| name).join(", ");
            one(part)
                .ok_or_else(|| format!("SOFTCUDA_FAIL: {part:?} is not <what>:<nth>, with one of {known}"))
        })
        .collect()
}

/// Fails if this is the one that is to.
///
/// # Errors
///
/// `CUDA_ERROR_ILLEGAL_ADDRESS` for work in a stream, `CUDA_ERROR_OUT_OF_MEMORY` for what is made at once, and what
/// is usual for the rest.
pub(crate) fn meet(what: What) -> Result {
    let mut met = false;
    PLAN.lock().retain_mut(|(planned, left)| {
        if *planned != what {
            return true;
        }
        *left -= 1;
        met |= *left == 0;
        *left > 0
    });
    if !met {
        return Ok(());
    }
    eprintln!("softcuda: {what:?} fails, as was asked for");
    Err(match what {
        What::Copy | What::Launch => Code::ILLEGAL_ADDRESS,
        What::Alloc | What::AllocHost | What::Event | What::Stream => Code::OUT_OF_MEMORY,
        What::IpcOpen => Code::MAP_FAILED,
        What::Init | What::Compile => Code::UNKNOWN,
    })
}

/// Makes the n-th call of a kind from now fail; 0 if that was understood.
///
/// # Safety
///
/// `what` is a text that a zero ends.
#[unsafe(no_mangle)]
unsafe extern "C" fn softcuda_fail(what: *const c_char, nth: u64) -> i32 {
    // SAFETY: see above.
    let what = unsafe { CStr::from_ptr(what) }.to_string_lossy();
    match plan(&format!("{what}:{nth}")) {
        Ok(more) => {
            PLAN.lock().extend(more);
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
    fn plans_are_read() {
        assert_eq!(plan("launch:3,alloc_host:1"), Ok(vec![(What::Launch, 3), (What::AllocHost, 1)]));
        assert_eq!(plan(""), Ok(Vec::new()));
        assert!(plan("launch").unwrap_err().contains("launch"));
        assert!(plan("lunch:1").is_err() && plan("copy:0").is_err());
    }
}
