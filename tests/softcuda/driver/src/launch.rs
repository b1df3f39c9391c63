//! Kernel launches. Arguments are checked as CUDA does, and the kernel runs in the stream's thread.
//! Accesses outside its memory are caught and become an error.

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Once, OnceLock};

use crate::device::current;
use crate::device::memory::space;
use crate::device::module::{Kernel, kernel};
use crate::device::races;
use crate::device::stream::{Work, own_stream};
use crate::entry::{In, api};
use crate::error::{Code, Result};
use crate::faults::meet;
use crate::handles::Handle;
use crate::host::pinned;
use crate::settings::CallKind;

const MOST_THREADS: usize = 1024;
/// Stack size in bytes of a fiber, which runs one thread of a block. It is not a power of two:
/// otherwise equal offsets in all stacks would compete for the same cache lines.
const STACK: usize = (64 << 10) + 13 * 64;

/// The arguments of a launch for the module's compiled code, in the layout of `__sc_launch` in
/// `after.h`.
#[repr(C)]
struct Launch {
    grid: [u32; 3],
    block: [u32; 3],
    shared: *mut c_void,
    stacks: *mut u8,
    stack_bytes: usize,
    escape: *mut *mut c_void,
}

/// 16 bytes of packed kernel arguments, aligned for any type.
#[derive(Clone, Copy, Default)]
#[repr(C, align(16))]
struct Slot([u8; 16]);

thread_local! {
    /// Jump buffer for memory faults of the kernel that runs in this thread. Null while no kernel
    /// runs.
    static ESCAPE: Cell<*mut c_void> = const { Cell::new(ptr::null_mut()) };
    static STACKS: Stacks = Stacks::map();
}

/// Stacks for all fibers of one thread, enough for the largest block. Pages that were never used
/// occupy no memory.
struct Stacks(*mut u8);

impl Stacks {
    fn map() -> Stacks {
        // SAFETY: new memory at addresses that the kernel chooses.
        let at = unsafe {
            libc::mmap(
                ptr::null_mut(),
                MOST_THREADS * STACK,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };

        assert!(at != libc::MAP_FAILED, "no memory for stacks");
        Stacks(at.cast())
    }
}

impl Drop for Stacks {
    fn drop(&mut self) {
        // SAFETY: mapped by `map`; the thread ends, so nothing runs on them.
        unsafe { libc::munmap(self.0.cast(), MOST_THREADS * STACK) };
    }
}

unsafe extern "C" {
    /// Jumps to a buffer that `sigsetjmp` filled. This is C's `siglongjmp`, which the `libc` crate
    /// does not declare.
    fn siglongjmp(to: *mut c_void, value: c_int) -> !;
}

/// The handlers of SIGSEGV and of SIGBUS that were installed before this driver's.
static BEFORE: OnceLock<[libc::sigaction; 2]> = OnceLock::new();

/// Installs signal handlers that turn memory faults of kernels into errors, once per process. Other
/// faults go to the previous handlers.
fn catch_faults() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let signals = [libc::SIGSEGV, libc::SIGBUS];
        // SAFETY: all-zero is a valid `sigaction`, and reading the installed one changes nothing.
        let before = signals.map(|signal| unsafe {
            let mut action: libc::sigaction = MaybeUninit::zeroed().assume_init();
            libc::sigaction(signal, ptr::null(), &mut action);
            action
        });
        let _ = BEFORE.set(before);

        for signal in signals {
            // SAFETY: the handler only uses operations allowed in a signal handler, and finds
            // `BEFORE` set.
            unsafe {
                let mut action: libc::sigaction = MaybeUninit::zeroed().assume_init();
                action.sa_sigaction = on_fault as *const () as usize;
                // On the signal stack, if the thread has one: its own stack may have overflowed.
                action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
                libc::sigemptyset(&mut action.sa_mask);
                libc::sigaction(signal, &action, ptr::null_mut());
            }
        }
    });
}

/// A handler of the program that was installed with `SA_SIGINFO`.
type SignalHandler = extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void);

extern "C" fn on_fault(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // A fault in a thread that runs no kernel is not ours. A thread with a kernel has initialized
    // this variable before, so reading it here allocates nothing.
    let escape = ESCAPE.get();
    if !escape.is_null() {
        ESCAPE.set(ptr::null_mut());
        // SAFETY: a kernel runs on this thread, so `__sc_run` is below on its stack, with this
        // buffer set. The jump skips only frames of module code, which need no cleanup, and this
        // function.
        unsafe { siglongjmp(escape, Code::ILLEGAL_ADDRESS.0 as c_int) }
    }

    let Some(before) = BEFORE.get() else { return };
    let before = before[usize::from(signal == libc::SIGBUS)];
    match before.sa_sigaction {
        libc::SIG_DFL | libc::SIG_IGN => {
            // SAFETY: the default action is restored. After the return, the access faults again and
            // ends the process.
            unsafe { libc::signal(signal, libc::SIG_DFL) };
        }
        handler if before.sa_flags & libc::SA_SIGINFO != 0 => {
            // SAFETY: it was installed with SA_SIGINFO, so it takes three arguments.
            let handler = unsafe { std::mem::transmute::<usize, SignalHandler>(handler) };
            handler(signal, info, context);
        }
        handler => {
            // SAFETY: it was installed without SA_SIGINFO, so it takes one argument.
            let handler = unsafe { std::mem::transmute::<usize, extern "C" fn(c_int)>(handler) };
            handler(signal);
        }
    }
}

/// Packs the arguments of a launch into slots. Device addresses become addresses in the alias,
/// through which the driver accesses memory. A pointer to pageable host memory becomes an address
/// that faults.
fn pack(kernel: &Kernel, parameters: &In<In<u8>>) -> Result<Vec<Slot>> {
    let mut slots = Vec::new();

    let (first, last) = space().range();
    for (at, argument) in kernel.entry.arguments.iter().enumerate() {
        let mut bytes = parameters.at(at)?.bytes(argument.bytes as usize)?;
        // Structures may contain addresses too.
        for word in bytes.chunks_exact_mut(8) {
            let value = u64::from_ne_bytes([
                word[0], word[1], word[2], word[3], word[4], word[5], word[6], word[7],
            ]);

            // A pointer to pageable host memory, which a GPU cannot access. It becomes an
            // inaccessible address, so that its use faults.
            let unreached = argument.is_pointer && value != 0 && pinned(value, 1).is_none();
            if (first..last).contains(&value) {
                word.copy_from_slice(&(value + space().distance()).to_ne_bytes());
            } else if unreached {
                word.copy_from_slice(&(first + value % (last - first)).to_ne_bytes());
            }
        }

        for part in bytes.chunks(16) {
            let mut slot = Slot::default();
            slot.0[..part.len()].copy_from_slice(part);
            slots.push(slot);
        }
    }
    Ok(slots)
}

/// Runs a kernel in the calling thread until it ends. `shared` is the bytes of dynamic shared
/// memory. Fails with the kernel's error code, for example for an illegal address.
fn run(
    kernel: &Kernel,
    mut arguments: Vec<Slot>,
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
) -> Result {
    meet(CallKind::Launch)?;

    let mut shared = vec![[0xCD_u8; 16]; (shared as usize).div_ceil(16) + 8];
    let code = STACKS.with(|stacks| {
        let launch = Launch {
            grid,
            block,
            // At least 16 bytes of alignment, which vectors of four floats need.
            shared: shared
                .as_mut_ptr()
                .cast::<u8>()
                .wrapping_add(shared.as_ptr().align_offset(16))
                .cast(),
            stacks: stacks.0,
            stack_bytes: STACK,
            escape: ESCAPE.with(Cell::as_ptr),
        };

        // SAFETY: this is `__sc_run` of the module. It has this type and lives as long as the
        // kernel.
        let run = unsafe {
            std::mem::transmute::<
                usize,
                unsafe extern "C" fn(usize, *mut Slot, *const Launch) -> c_int,
            >(kernel.library.run)
        };
        // SAFETY: the arguments are packed as the kernel's own adapter reads them. The stacks are
        // this thread's, and enough for the most threads of a block. As on a GPU, the program
        // promises that the kernel itself is valid; faults are returned as a code.
        unsafe { run(kernel.entry.call, arguments.as_mut_ptr(), &launch) }
    });

    if code == 0 {
        return Ok(());
    }
    eprintln!("softcuda: kernel {:?} ended with error {code}", kernel.name);
    if code as u32 == Code::LAUNCH_TIMEOUT.0 {
        eprintln!(
            "softcuda: all threads of a block wait for one another, as with a barrier in a branch"
        );
    }
    Err(Code(code as u32))
}

api! {
    /// Launches a kernel in a stream, and returns without waiting. `shared` is the bytes of dynamic
    /// shared memory. Checks the accesses that `softcuda_note_use` declared for this stream for
    /// races.
    fn cuLaunchKernel(
        function: Handle,
        grid_x: u32,
        grid_y: u32,
        grid_z: u32,
        block_x: u32,
        block_y: u32,
        block_z: u32,
        shared: u32,
        stream: Handle,
        parameters: In<In<u8>>,
        extra: u64,
    ) {
        let uses = races::noted(stream);
        let stream = own_stream(stream)?;
        let kernel: Arc<Kernel> = kernel(function)?;
        if kernel.context != current()?.handle {
            return Err(Code::INVALID_HANDLE);
        }

        let grid = [grid_x, grid_y, grid_z];
        let block = [block_x, block_y, block_z];
        let threads = block.iter().try_fold(1_u32, |all, side| all.checked_mul(*side));
        let block_fits =
            block_z <= 64 && threads.is_some_and(|all| (1..=MOST_THREADS as u32).contains(&all));
        let grid_fits =
            grid_x <= i32::MAX as u32 && grid_y <= 65535 && grid_z <= 65535 && !grid.contains(&0);
        if !block_fits || !grid_fits || shared > kernel.dynamic_shared.load(Ordering::Relaxed) {
            return Err(Code::INVALID_VALUE);
        }

        if threads.is_some_and(|all| all > kernel.entry.threads) {
            // The block is larger than the launch bounds for which the kernel is compiled.
            return Err(Code::LAUNCH_OUT_OF_RESOURCES);
        }
        if extra != 0 {
            eprintln!("softcuda: arguments in `extra` are unsupported; use `kernelParams`");
            return Err(Code::NOT_SUPPORTED);
        }

        let arguments = pack(&kernel, &parameters)?;
        catch_faults();
        stream.issue(
            Work::new("a kernel", move || run(&kernel, arguments, grid, block, shared)),
            &uses,
        );
        Ok(())
    }
}
