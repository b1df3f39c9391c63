//! The C interface of UCX's library: types, the functions used here, and the search for the
//! library.
//!
//! The types come from `ucx1-sys`, with one exception. In C `ucs_status_t` is an enumeration in a
//! byte, and libraries newer than those bindings may return values that they do not know. As a Rust
//! enumeration that would be undefined behaviour. So here it is a number, [`UcxStatus`], and the
//! functions are declared anew with it. They are looked up at run time: a program built with UCX
//! also runs on machines without it.

use std::env;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use rustix::process::geteuid;
pub(super) use ucx1_sys::{
    ucp_address_t, ucp_am_handler_param, ucp_am_handler_param_field, ucp_am_recv_attr_t,
    ucp_am_recv_param_t, ucp_config_t, ucp_context_attr, ucp_context_attr_field, ucp_context_h,
    ucp_ep_h, ucp_ep_params, ucp_ep_params_field, ucp_err_handling_mode_t, ucp_feature,
    ucp_op_attr_t, ucp_params, ucp_params_field, ucp_request_param_t, ucp_send_am_flags,
    ucp_worker_h, ucp_worker_params, ucp_worker_params_field, ucs_memory_type, ucs_thread_mode_t,
};

/// The version (major, minor) of the UCX interface that the declarations above belong to. An older
/// library, or one with another major version, is refused.
pub(super) const API: (c_uint, c_uint) = (1, 12);

/// Environment variable with the path of the UCX library, for a library that is not found
/// otherwise.
const LIBRARY_VARIABLE: &str = "MPMD_UCX_LIBRARY";
const LIBRARY: &str = "libucp.so.0";

/// A status code of UCX: 0 for success, 1 for an operation in progress, below 0 for an error.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(transparent)]
pub(super) struct UcxStatus(pub(super) i8);

impl UcxStatus {
    pub(super) const OK: Self = Self(0);
    pub(super) const IN_PROGRESS: Self = Self(1);
    pub(super) const BUSY: Self = Self(-15);
    pub(super) const CANCELLED: Self = Self(-16);

    /// Decodes a pointer that UCX returned as the status of an operation. Returns `None` if it
    /// points to a request.
    ///
    /// Null is success, and the last 100 addresses are errors (`UCS_PTR_IS_ERR` in
    /// `ucs/type/status.h`).
    pub(super) fn of_pointer(pointer: *mut c_void) -> Option<Self> {
        let value = pointer as isize;
        match value {
            0 => Some(Self::OK),
            -100..0 => i8::try_from(value).ok().map(Self),
            _ => None,
        }
    }
}

/// Called at the end of a send. Arguments: request, status, user argument.
pub(super) type SendCallback = unsafe extern "C" fn(*mut c_void, UcxStatus, *mut c_void);
/// Called at the end of a fetch. Arguments: request, status, number of bytes fetched, user
/// argument.
pub(super) type ReceiveCallback = unsafe extern "C" fn(*mut c_void, UcxStatus, usize, *mut c_void);
/// Called when a message arrives. Arguments: user argument; header and its length; payload or its
/// descriptor, and the payload's length; parameters.
pub(super) type MessageCallback = unsafe extern "C" fn(
    *mut c_void,
    *const c_void,
    usize,
    *mut c_void,
    usize,
    *const ucp_am_recv_param_t,
) -> UcxStatus;
/// Called when an endpoint has failed. Arguments: user argument, endpoint, status.
pub(super) type ErrorCallback = unsafe extern "C" fn(*mut c_void, ucp_ep_h, UcxStatus);

macro_rules! functions {
    ($(fn $name:ident($($argument:ty),* $(,)?) $(-> $result:ty)?;)*) => {
        /// The functions of the UCX library, as its header file declares them.
        #[allow(missing_docs, reason = "UCX's own documentation has them")]
        pub(super) struct Functions {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Functions {
            fn of(library: &libloading::Library) -> Result<Self, libloading::Error> {
                // SAFETY: each symbol is a function of UCX's public interface, and the type given
                // here is that of its declaration in `ucp/api/ucp.h` and `ucs/type/status.h`,
                // version 1.12, with `ucs_status_t` as the byte that it is in C. Later 1.x versions
                // keep these signatures.
                unsafe {
                    Ok(Self {
                        $($name: *library.get(concat!(stringify!($name), "\0").as_bytes())?,)*
                    })
                }
            }
        }
    };
}

functions! {
    fn ucs_status_string(UcxStatus) -> *const c_char;
    fn ucp_get_version(*mut c_uint, *mut c_uint, *mut c_uint);
    fn ucp_config_read(*const c_char, *const c_char, *mut *mut ucp_config_t) -> UcxStatus;
    fn ucp_config_modify(*mut ucp_config_t, *const c_char, *const c_char) -> UcxStatus;
    fn ucp_config_release(*mut ucp_config_t);
    fn ucp_init_version(
        c_uint, c_uint, *const ucp_params, *const ucp_config_t, *mut ucp_context_h,
    ) -> UcxStatus;
    fn ucp_cleanup(ucp_context_h);
    fn ucp_context_query(ucp_context_h, *mut ucp_context_attr) -> UcxStatus;
    fn ucp_worker_create(ucp_context_h, *const ucp_worker_params, *mut ucp_worker_h) -> UcxStatus;
    fn ucp_worker_destroy(ucp_worker_h);
    fn ucp_worker_get_address(ucp_worker_h, *mut *mut ucp_address_t, *mut usize) -> UcxStatus;
    fn ucp_worker_release_address(ucp_worker_h, *mut ucp_address_t);
    fn ucp_worker_get_efd(ucp_worker_h, *mut c_int) -> UcxStatus;
    fn ucp_worker_arm(ucp_worker_h) -> UcxStatus;
    fn ucp_worker_signal(ucp_worker_h) -> UcxStatus;
    fn ucp_worker_progress(ucp_worker_h) -> c_uint;
    fn ucp_worker_set_am_recv_handler(ucp_worker_h, *const ucp_am_handler_param) -> UcxStatus;
    fn ucp_ep_create(ucp_worker_h, *const ucp_ep_params, *mut ucp_ep_h) -> UcxStatus;
    fn ucp_ep_close_nbx(ucp_ep_h, *const ucp_request_param_t) -> *mut c_void;
    fn ucp_ep_print_info(ucp_ep_h, *mut libc::FILE);
    fn ucp_am_send_nbx(
        ucp_ep_h, c_uint, *const c_void, usize, *const c_void, usize, *const ucp_request_param_t,
    ) -> *mut c_void;
    fn ucp_am_recv_data_nbx(
        ucp_worker_h, *mut c_void, *mut c_void, usize, *const ucp_request_param_t,
    ) -> *mut c_void;
    fn ucp_am_data_release(ucp_worker_h, *mut c_void);
    fn ucp_request_check_status(*mut c_void) -> UcxStatus;
    fn ucp_request_free(*mut c_void);
}

/// The loaded UCX library. It is never unloaded.
pub(super) struct UcxLibrary {
    pub(super) functions: Functions,
    pub(super) version: (c_uint, c_uint, c_uint),
    pub(super) path: PathBuf,
    // Never unloaded: UCX leaves handlers and threads behind that use its code.
    _library: libloading::Library,
}

/// Returns the UCX library, or the reason why it cannot be used. The first call loads it.
pub(super) fn library() -> Result<&'static UcxLibrary, &'static NoUcxLibrary> {
    static LOADED: OnceLock<Result<UcxLibrary, NoUcxLibrary>> = OnceLock::new();
    LOADED.get_or_init(UcxLibrary::load).as_ref()
}

/// The reason why UCX's library cannot be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum NoUcxLibrary {
    /// No library file could be loaded, for the given reasons.
    #[error(
        "no {LIBRARY} can be loaded ({}); name its folder in LD_LIBRARY_PATH, or its file in \
         {LIBRARY_VARIABLE}",
        tried.join("; ")
    )]
    NotFound { tried: Vec<String> },
    /// The library lacks a function that this transport needs.
    #[error("{}: {error}", place.display())]
    NoFunction {
        place: PathBuf,
        error: libloading::Error,
    },
    #[error(
        "{} is UCX {version}; needed is {}.{} or a later {}.x",
        path.display(),
        API.0,
        API.1,
        API.0
    )]
    Version { path: PathBuf, version: String },
    /// The library `part` belongs to another installation of UCX.
    #[error(
        "{} has come with {}, of another UCX; put the folder of one of them first in \
         LD_LIBRARY_PATH",
        path.display(),
        part.display()
    )]
    Mixed { path: PathBuf, part: PathBuf },
}

impl UcxLibrary {
    /// Loads the library from the path in `MPMD_UCX_LIBRARY`. Without that variable, asks the
    /// system's loader, then looks at the build's own copies beside the program.
    fn load() -> Result<Self, NoUcxLibrary> {
        let mut tried = Vec::new();
        let named = env::var_os(LIBRARY_VARIABLE)
            .filter(|name| !name.is_empty())
            .map(PathBuf::from);
        let places = match named {
            Some(name) => vec![name],
            None => {
                let copies = env::current_exe()
                    .map(|program| built(&program))
                    .unwrap_or_default();
                tried.extend(copies.refused);
                std::iter::once(PathBuf::from(LIBRARY))
                    .chain(copies.trusted)
                    .collect()
            }
        };

        for place in places {
            // SAFETY: loading runs the initialisers of UCX's libraries. They read variables and
            // install handlers, and touch nothing of this program.
            match unsafe { libloading::Library::new(&place) } {
                Ok(library) => return Self::of(library, &place),
                Err(error) => tried.push(error.to_string()),
            }
        }

        Err(NoUcxLibrary::NotFound { tried })
    }

    fn of(library: libloading::Library, place: &Path) -> Result<Self, NoUcxLibrary> {
        let functions = Functions::of(&library).map_err(|error| NoUcxLibrary::NoFunction {
            place: place.to_owned(),
            error,
        })?;
        let mut major = 0;
        let mut minor = 0;
        let mut patch = 0;
        // SAFETY: the function writes three numbers through the pointers, which point to local
        // variables.
        unsafe { (functions.ucp_get_version)(&mut major, &mut minor, &mut patch) };

        let path = mapped(LIBRARY).unwrap_or_else(|| place.to_owned());
        if major != API.0 || minor < API.1 {
            let version = format!("{major}.{minor}.{patch}");
            return Err(NoUcxLibrary::Version { path, version });
        }
        if let Some(part) = mapped("libucs.so.0")
            && part.parent() != path.parent()
        {
            return Err(NoUcxLibrary::Mixed { path, part });
        }

        Ok(Self {
            functions,
            version: (major, minor, patch),
            path,
            _library: library,
        })
    }

    /// Returns the version in the form `1.12.1`.
    pub(super) fn version(&self) -> String {
        let (major, minor, patch) = self.version;
        format!("{major}.{minor}.{patch}")
    }
}

/// Copies of the UCX library that cargo builds of this program have left.
#[derive(Default)]
struct BuiltCopies {
    /// Paths of copies that can be loaded, newest first.
    trusted: Vec<PathBuf>,
    /// Copies that are not loaded because another user could have written them, with the reason.
    refused: Vec<String>,
}

/// Finds the copies of the UCX library that cargo builds of `program` have left.
fn built(program: &Path) -> BuiltCopies {
    let folders = program
        .ancestors()
        .skip(1)
        .take(2)
        .map(|folder| folder.join("build"));

    let mut found: Vec<_> = folders
        .filter_map(|folder| std::fs::read_dir(folder).ok())
        .flatten()
        .filter_map(|entry| {
            let entry = entry.ok()?;
            let file = entry.path().join("out/lib").join(LIBRARY);
            let ours = entry.file_name().to_string_lossy().starts_with("ucx1-sys-");
            let written = file.metadata().ok()?.modified().ok()?;
            ours.then_some((written, file))
        })
        .collect();

    found.sort();

    let mut copies = BuiltCopies::default();
    for (_, file) in found.into_iter().rev() {
        match out_of_others_reach(&file) {
            Ok(file) => copies.trusted.push(file),
            Err(why) => copies.refused.push(format!("{}: {why}", file.display())),
        }
    }
    copies
}

/// The reason why a copy of the library is not loaded unless the user names it.
#[derive(Debug, thiserror::Error)]
enum UntrustedPath {
    /// A symbolic link in the path cannot be resolved.
    #[error(transparent)]
    Unresolved(#[from] std::io::Error),
    #[error("{}: {error}", path.display())]
    Unreadable {
        path: PathBuf,
        error: std::io::Error,
    },
    #[error("{} belongs to user {user}", path.display())]
    Foreign { path: PathBuf, user: u32 },
    #[error("{} can be written by others than its owner", path.display())]
    Writable { path: PathBuf },
}

/// Resolves the symbolic links in a file's path. Returns an error if another user could replace the
/// file, a file that it loads from its folder, or a folder above it.
fn out_of_others_reach(file: &Path) -> Result<PathBuf, UntrustedPath> {
    let file = file.canonicalize()?;
    let own = geteuid().as_raw();
    for (height, path) in file.ancestors().enumerate() {
        let data = path
            .symlink_metadata()
            .map_err(|error| UntrustedPath::Unreadable {
                path: path.to_owned(),
                error,
            })?;
        if data.uid() != 0 && data.uid() != own {
            return Err(UntrustedPath::Foreign {
                path: path.to_owned(),
                user: data.uid(),
            });
        }

        // In a sticky folder such as /tmp, only the owner of an entry can replace it.
        let keeps_entries = height > 1 && data.mode() & STICKY != 0;
        if data.mode() & WRITABLE_BY_OTHERS != 0 && !keeps_entries {
            return Err(UntrustedPath::Writable {
                path: path.to_owned(),
            });
        }
    }
    Ok(file)
}

/// The permission bits that let the group and all other users write.
const WRITABLE_BY_OTHERS: u32 = 0o022;
const STICKY: u32 = 0o1000;

/// Returns the path of the file named `name` that is mapped into this process.
fn mapped(name: &str) -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let stem = name.split(".so").next()?.to_owned() + ".so";
    maps.lines().find_map(|line| {
        let path = &line[line.find('/')?..];
        Path::new(path)
            .file_name()?
            .to_str()?
            .starts_with(&stem)
            .then(|| PathBuf::from(path))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_of_pointer_is_none_for_requests_only() {
        assert_eq!(
            UcxStatus::of_pointer(std::ptr::null_mut()),
            Some(UcxStatus::OK)
        );
        assert_eq!(
            UcxStatus::of_pointer(-25isize as *mut c_void),
            Some(UcxStatus(-25))
        );
        // A value that the bindings do not know is an error like the others.
        assert_eq!(
            UcxStatus::of_pointer(-99isize as *mut c_void),
            Some(UcxStatus(-99))
        );
        assert_eq!(UcxStatus::of_pointer(-101isize as *mut c_void), None);
        assert_eq!(UcxStatus::of_pointer(0x1000 as *mut c_void), None);
    }

    #[test]
    fn library_that_others_can_replace_is_not_loaded() {
        use std::fs::{Permissions, create_dir_all, set_permissions, write};
        use std::os::unix::fs::{PermissionsExt, chown};

        // In the system's temporary folder, which is sticky.
        let name = format!("mpmd-ucx-{}", std::process::id());
        let home = env::temp_dir().join(name);
        let folder = home.join("build/ucx1-sys-1/out/lib");
        create_dir_all(&folder).unwrap();
        let file = folder.join(LIBRARY);
        write(&file, "").unwrap();
        let mode =
            |path: &Path, mode: u32| set_permissions(path, Permissions::from_mode(mode)).unwrap();
        for path in file.ancestors().take(6) {
            mode(path, 0o755);
        }
        let found = || {
            let copies = built(&home.join("deps/program"));
            (copies.trusted, copies.refused)
        };
        let good = (vec![file.canonicalize().unwrap()], vec![]);
        let first = found();
        let mut wrong = Vec::new();
        for path in file.ancestors().take(6) {
            for loose in [0o777, 0o775] {
                mode(path, loose);
                wrong.push((path.to_owned(), "can be written by others", found()));
                mode(path, 0o755);
            }
        }
        // Another user could add a library there that this one loads.
        mode(&folder, 0o1777);
        wrong.push((folder.clone(), "can be written by others", found()));
        mode(&folder, 0o755);
        for path in [&home, &file] {
            match chown(path, Some(12345), None) {
                Ok(()) => {
                    wrong.push((path.clone(), "belongs to user 12345", found()));
                    chown(path, Some(geteuid().as_raw()), None).unwrap();
                }
                Err(error) => eprintln!("skipped: only root gives files away ({error})"),
            }
        }
        let last = found();
        std::fs::remove_dir_all(&home).unwrap();
        assert_eq!(first, good);
        for (path, why, (trusted, refused)) in wrong {
            assert!(trusted.is_empty(), "{}", path.display());
            let named = refused[0].contains(why) && refused[0].contains(&*path.to_string_lossy());
            assert!(named, "{}: {refused:?}", path.display());
        }
        assert_eq!(last, good);
    }

    #[test]
    fn the_library_is_found_and_new_enough() {
        let library = library().expect("UCX is built with this program");
        assert!(library.version >= (1, 12, 0), "{:?}", library.version);
        assert!(library.path.is_absolute(), "{}", library.path.display());
    }
}
