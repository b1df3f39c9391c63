//! Modules: compiled programs loaded into the process, and their kernels.

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_void};
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::Mutex;

use crate::compile::{MARK_LENGTH, Refused, is_image, library};
use crate::device::memory::memory_file;
use crate::device::{Context, RESERVED_SHARED, current};
use crate::entry::{In, Out, Text, api};
use crate::error::{Code, Result};
use crate::handles::{Handle, Handles};
use crate::settings::settings;

static MODULES: Handles<Module> = Handles::new(4);
static KERNELS: Handles<Kernel> = Handles::new(5);

/// Default limit on the dynamic shared memory of a block, in bytes. `SOFTCUDA_SHARED` is the
/// highest limit that `cuFuncSetAttribute` can set.
const SHARED: u32 = 48 << 10;

pub(crate) struct Module {
    handle: Handle,
    context: Handle,
    library: Arc<Library>,
    entries: Vec<(CString, Entry)>,
    /// Handles of the kernels that were requested so far, by kernel name. Each kernel has one
    /// handle.
    kernels: Mutex<HashMap<String, Handle>>,
}

pub(crate) struct Kernel {
    pub(crate) name: CString,
    pub(crate) context: Handle,
    module: Handle,
    /// The kernel's address, arguments and limit on threads, as the compiled module describes them.
    pub(crate) entry: Entry,
    /// The library with the kernel's code, which stays loaded while this is held.
    pub(crate) library: Arc<Library>,
    /// Limit on the dynamic shared memory of a launch, in bytes.
    pub(crate) dynamic_shared: AtomicU32,
}

/// The size of one argument of a kernel, and whether it is a pointer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KernelArgument {
    pub(crate) bytes: u32,
    pub(crate) is_pointer: bool,
}

/// The address and the arguments of a kernel. The address is valid while its library is loaded.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) call: usize,
    pub(crate) arguments: Vec<KernelArgument>,
    /// Limit on the threads of a block: the kernel's launch bound, and at most 1024.
    pub(crate) threads: u32,
}

/// A compiled module, loaded into the process as a shared library.
pub(crate) struct Library {
    handle: NonNull<c_void>,
    /// The library's file. It stays open while the library is loaded, because the loader identifies
    /// libraries by path.
    _file: OwnedFd,
    pub(crate) run: usize,
}

// SAFETY: the loader's functions may be called from any thread. The code of a module keeps its
// state in thread-local variables.
unsafe impl Send for Library {}
// SAFETY: see above.
unsafe impl Sync for Library {}

/// A row of the kernel table that `after.h` defines. `count` is the number of arguments.
#[repr(C)]
struct Row {
    name: *const c_char,
    address: *const c_void,
    call: *const c_void,
    count: u32,
    sizes: *const u32,
    pointers: *const u8,
    threads: u32,
}

impl Library {
    fn load(code: &[u8]) -> Result<Library> {
        let file = memory_file(code.len() as u64)?;
        let mut rest = code;
        while !rest.is_empty() {
            // SAFETY: the descriptor is open, and the bytes are of a slice.
            let wrote = unsafe { libc::write(file.as_raw_fd(), rest.as_ptr().cast(), rest.len()) };
            rest = rest
                .get(usize::try_from(wrote).map_err(|_| Code::OUT_OF_MEMORY)?..)
                .unwrap_or(&[]);
        }

        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let path = CString::new(path).map_err(|_| Code::UNKNOWN)?;
        // SAFETY: a library that `compile` made; its only initialisers are of kernels' own
        // variables.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        let Some(handle) = NonNull::new(handle) else {
            // SAFETY: the call just failed in this thread, so there is a text.
            let why = unsafe { CStr::from_ptr(libc::dlerror()) };
            eprintln!(
                "softcuda: a module cannot be loaded: {}",
                why.to_string_lossy()
            );
            return Err(Code::INVALID_IMAGE);
        };

        let mut library = Library {
            handle,
            _file: file,
            run: 0,
        };
        library.run = library.symbol(c"__sc_run").ok_or(Code::INVALID_IMAGE)? as usize;
        Ok(library)
    }

    fn symbol(&self, name: &CStr) -> Option<*mut c_void> {
        // SAFETY: the library is loaded, and the name a text.
        let found = unsafe { libc::dlsym(self.handle.as_ptr(), name.as_ptr()) };
        (!found.is_null()).then_some(found)
    }

    /// Returns the kernels that can be found by name, as (name, entry).
    fn entries(&self) -> Vec<(CString, Entry)> {
        let mut entries = Vec::new();
        let Some(table) = self.symbol(c"__sc_kernels") else {
            return entries;
        };
        let mut row = table as *const Row;
        loop {
            // SAFETY: the table is of the library's own memory, and ends with a row without a name.
            let found = unsafe { &*row };
            if found.name.is_null() {
                return entries;
            }

            // SAFETY: a name that is not null is a zero-terminated string.
            let name = unsafe { CStr::from_ptr(found.name) };
            // As with CUDA, a kernel without C linkage cannot be found by its plain name.
            let plain = !name.to_bytes().iter().any(|byte| b"<>:, &".contains(byte));
            if !plain || self.symbol(name).map(|at| at.cast_const()) == Some(found.address) {
                let count = found.count as usize;
                // SAFETY: the row says how many entries both arrays have.
                let (sizes, pointers) = unsafe {
                    (
                        std::slice::from_raw_parts(found.sizes, count),
                        std::slice::from_raw_parts(found.pointers, count),
                    )
                };

                let arguments = sizes
                    .iter()
                    .zip(pointers)
                    .map(|(size, pointer)| KernelArgument {
                        bytes: *size,
                        is_pointer: *pointer != 0,
                    });
                let entry = Entry {
                    call: found.call as usize,
                    arguments: arguments.collect(),
                    threads: found.threads.min(1024),
                };
                entries.push((name.to_owned(), entry));
            }

            // SAFETY: not the last row, so there is another.
            row = unsafe { row.add(1) };
        }
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        // SAFETY: loaded by `load`; launches hold the library, so none of its code runs.
        unsafe { libc::dlclose(self.handle.as_ptr()) };
    }
}

/// Returns the kernel of a handle; fails with `CUDA_ERROR_INVALID_HANDLE` if there is none.
pub(crate) fn kernel(handle: Handle) -> Result<Arc<Kernel>> {
    KERNELS.get(handle)
}

/// Removes the modules and kernels of a context that is being destroyed. Launches keep their code
/// loaded until they end.
pub(crate) fn end_all(context: &Context) {
    KERNELS.remove_all(|kernel| kernel.context == context.handle);
    MODULES.remove_all(|module| module.context == context.handle);
}

fn load(handle: &Out<Handle>, image: &[u8]) -> Result {
    let context = current()?;
    context.check()?;
    handle.required()?;

    let code = library(image).map_err(|refused| match refused {
        Refused::Foreign => {
            eprintln!("softcuda: cannot load a module that softcuda's own NVRTC did not compile");
            Code::INVALID_PTX
        }
        Refused::OtherVersion => {
            eprintln!("softcuda: cannot load a module compiled by another version of softcuda");
            Code::INVALID_PTX
        }
        Refused::Damaged => Code::INVALID_IMAGE,
    })?;

    let library = Arc::new(Library::load(&code)?);
    let made = MODULES.insert(|handle| Module {
        handle,
        context: context.handle,
        entries: library.entries(),
        library,
        kernels: Mutex::default(),
    });
    handle.set(made.handle)
}

/// Copies the image at a C pointer. An image of this driver is a zero-terminated string. Of other
/// images, only a few bytes are read.
fn image(pointer: &In<u8>) -> Result<Vec<u8>> {
    // Read byte by byte up to the mark, because a foreign image may end anywhere.
    let mut bytes = Vec::new();
    while bytes.len() < MARK_LENGTH {
        let byte = pointer.at(bytes.len())?;
        if byte == 0 {
            return Ok(bytes);
        }
        bytes.push(byte);
        if bytes.len() == MARK_LENGTH && !is_image(&bytes) {
            return Ok(bytes);
        }
    }

    Ok(Text::untyped(pointer.address() as *const c_char)
        .get()?
        .into_bytes())
}

api! {
    /// Loads a module from an image in memory, into the current context. Only images of this
    /// driver's own NVRTC can be loaded.
    fn cuModuleLoadData(handle: Out<Handle>, data: In<u8>) {
        load(&handle, &image(&data)?)
    }
}

api! {
    /// Loads a module from an image in memory, as `cuModuleLoadData` does; the options for the JIT
    /// compiler are ignored.
    fn cuModuleLoadDataEx(
        handle: Out<Handle>, data: In<u8>, count: u32, options: u64, values: u64,
    ) {
        let _ = (count, options, values);
        load(&handle, &image(&data)?)
    }
}

api! {
    /// Loads a module from a file with an image of this driver's own NVRTC. Fails with
    /// `CUDA_ERROR_FILE_NOT_FOUND` if the file cannot be read.
    fn cuModuleLoad(handle: Out<Handle>, path: Text) {
        let bytes = std::fs::read(path.get()?).map_err(|_| Code::FILE_NOT_FOUND)?;
        let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
        load(&handle, &bytes[..end])
    }
}

api! {
    /// Unloads a module without waiting; its kernels' handles become invalid. Launches already
    /// issued still run.
    fn cuModuleUnload(handle: Handle) {
        let context = current()?;
        MODULES.remove(handle)?;
        KERNELS.remove_all(|kernel| kernel.module == handle);
        context.check()
    }
}

/// Returns the handle of a kernel. The first call for a kernel's name creates its handle.
fn function(module: &Module, name: &CStr, entry: &Entry) -> Handle {
    let mut kernels = module.kernels.lock();
    let text = name.to_string_lossy().into_owned();
    *kernels.entry(text).or_insert_with(|| {
        let mut made = 0;
        KERNELS.insert(|handle| {
            made = handle;
            Kernel {
                name: name.to_owned(),
                context: module.context,
                module: module.handle,
                entry: entry.clone(),
                library: module.library.clone(),
                dynamic_shared: AtomicU32::new(SHARED),
            }
        });
        made
    })
}

api! {
    /// Returns the handle of the kernel with a name; fails with `CUDA_ERROR_NOT_FOUND` if the
    /// module has none.
    fn cuModuleGetFunction(handle: Out<Handle>, module: Handle, name: Text) {
        current()?.check()?;
        let module = MODULES.get(module)?;
        let name = name.get()?;
        let found = module.entries.iter().find(|(known, _)| known.to_bytes() == name.as_bytes());
        let (name, entry) = found.ok_or(Code::NOT_FOUND)?;
        handle.set(function(&module, name, entry))
    }
}

api! {
    /// Returns the number of kernels of a module.
    fn cuModuleGetFunctionCount(count: Out<u32>, module: Handle) {
        count.set(MODULES.get(module)?.entries.len() as u32)
    }
}

api! {
    /// Writes the handles of up to `room` kernels of a module, in the order of the module's kernel
    /// table.
    fn cuModuleEnumerateFunctions(handles: Out<Handle>, room: u32, module: Handle) {
        let module = MODULES.get(module)?;
        let first = module.entries.iter().take(room as usize);
        handles.set_all(first.map(|(name, entry)| function(&module, name, entry)))
    }
}

api! {
    /// Checks a kernel's handle. All kernels are loaded with their module.
    fn cuFuncLoad(handle: Handle) {
        current()?.check()?;
        kernel(handle).map(drop)
    }
}

api! {
    /// Reports that a kernel is loaded: always 1.
    fn cuFuncIsLoaded(state: Out<u32>, handle: Handle) {
        kernel(handle)?;
        state.set(1)
    }
}

api! {
    /// Returns the offset and the size of a kernel's argument, in bytes. Fails with
    /// `CUDA_ERROR_INVALID_VALUE` for an index behind the last argument.
    fn cuFuncGetParamInfo(handle: Handle, index: usize, offset: Out<usize>, size: Out<usize>) {
        let kernel = kernel(handle)?;
        let sizes = &kernel.entry.arguments;
        let bytes = sizes.get(index).ok_or(Code::INVALID_VALUE)?.bytes as usize;

        // Each argument is aligned to its size, as numbers and pointers are.
        let place = |end: usize, size: u32| {
            let align = 1 << (size.trailing_zeros().min(4));
            end.next_multiple_of(align)
        };

        let end =
            sizes[..index]
                .iter()
                .map(|argument| argument.bytes)
                .fold(0, |end, size| place(end, size) + size as usize);
        offset.set(place(end, bytes as u32))?;
        size.set_if_wanted(bytes);
        Ok(())
    }
}

api! {
    /// Always fails with `CUDA_ERROR_NOT_SUPPORTED` and prints a message. Global variables of
    /// modules are not in device memory here.
    fn cuModuleGetGlobal_v2(address: Out<u64>, bytes: Out<usize>, handle: Handle, name: Text) {
        current()?.check()?;
        let _ = (address, bytes);
        MODULES.get(handle)?;
        let name = name.get()?;
        eprintln!("softcuda: the global variable {name:?} of a module has no address here");
        Err(Code::NOT_SUPPORTED)
    }
}

api! {
    /// Returns an attribute of a kernel by CUDA's number. Only the limits on threads (0) and on
    /// dynamic shared memory (8) depend on the kernel.
    fn cuFuncGetAttribute(value: Out<i32>, attribute: u32, handle: Handle) {
        let kernel = kernel(handle)?;
        value.set(match attribute {
            0 => kernel.entry.threads as i32, // threads of a block
            1..=3 | 7 | 9 => 0,               // memory that is not measured here
            4 => 32,                          // registers
            5 | 6 => 80,                      // versions
            8 => kernel.dynamic_shared.load(Ordering::Relaxed) as i32,
            _ => return Err(Code::INVALID_VALUE),
        })
    }
}

api! {
    /// Sets the limit on dynamic shared memory of a kernel's later launches, in bytes (attribute
    /// 8). Accepts attribute 9 without effect; fails for all others.
    fn cuFuncSetAttribute(handle: Handle, attribute: u32, value: i32) {
        current()?.check()?;
        let kernel = kernel(handle)?;
        match attribute {
            8 => {
                let bytes = u32::try_from(value).ok().filter(|bytes| *bytes <= settings().shared);
                kernel.dynamic_shared.store(bytes.ok_or(Code::INVALID_VALUE)?, Ordering::Relaxed);
                Ok(())
            }
            9 => Ok(()),
            _ => Err(Code::INVALID_VALUE),
        }
    }
}

api! {
    /// Accepts the preferred cache configuration of a kernel, which changes nothing here.
    fn cuFuncSetCacheConfig(handle: Handle, config: u32) {
        kernel(handle)?;
        if config > 3 { Err(Code::INVALID_VALUE) } else { Ok(()) }
    }
}

api! {
    /// Returns the name of a kernel. The pointer is valid until the module is unloaded.
    fn cuFuncGetName(name: Out<*const c_char>, handle: Handle) {
        name.set(kernel(handle)?.name.as_ptr())
    }
}

api! {
    /// Returns the handle of the module that contains a kernel.
    fn cuFuncGetModule(module: Out<Handle>, handle: Handle) {
        module.set(kernel(handle)?.module)
    }
}

api! {
    /// Returns the number of blocks that a multiprocessor holds at the same time, for `threads`
    /// threads and `shared` bytes of dynamic shared memory per block.
    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        blocks: Out<i32>, handle: Handle, threads: i32, shared: usize,
    ) {
        kernel(handle)?;
        if !(1..=1024).contains(&threads) || shared > settings().shared as usize {
            return Err(Code::INVALID_VALUE);
        }
        let reserved = RESERVED_SHARED as usize;
        let by_shared = (settings().shared as usize + reserved) / (shared + reserved);
        blocks.set((2048 / threads).min(32).min(by_shared as i32))
    }
}
