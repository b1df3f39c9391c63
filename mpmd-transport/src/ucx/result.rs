//! UCX's functions, each with a [`Result`]: no status is looked at twice, none is forgotten.
//!
//! As unsafe as the functions themselves: who calls answers for pointers and threads.

use std::ffi::{CStr, CString, c_int, c_uint, c_void};
use std::fmt;
use std::mem::zeroed;
use std::ptr::{NonNull, null, null_mut};

use super::sys::{self, Functions, Status};
use crate::transport::TransportError;

/// A call of UCX's that failed.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct UcxError {
    call: &'static str,
    status: Status,
}

impl fmt::Display for UcxError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.call, describe(self.status))
    }
}

impl UcxError {
    /// `call` has failed with this status.
    pub(super) fn new(call: &'static str, status: Status) -> Self {
        Self { call, status }
    }

    /// As a fault of this process, which was `doing` something.
    pub(super) fn environment(&self, doing: impl Into<String>) -> TransportError {
        TransportError::Environment { doing: doing.into(), why: self.to_string() }
    }
}

type Result<T> = std::result::Result<T, UcxError>;

/// UCX's words for a status, with its number.
pub(super) fn describe(status: Status) -> String {
    let Ok(library) = sys::library() else { return format!("status {}", status.0) };
    // Unknown ones are written into one place for all threads.
    static ONE_AT_A_TIME: parking_lot::Mutex<()> = parking_lot::Mutex::new(());
    let _alone = ONE_AT_A_TIME.lock();
    // SAFETY: the function takes any number and returns a string that lives as long as the library,
    // or, for unknown ones, until it is called again, which the lock prevents. It is copied here.
    let words = unsafe {
        let words = (library.functions.ucs_status_string)(status);
        (!words.is_null()).then(|| CStr::from_ptr(words).to_string_lossy().into_owned())
    };
    format!("{} ({})", words.unwrap_or_default(), status.0)
}

fn functions() -> &'static Functions {
    match sys::library() {
        Ok(library) => &library.functions,
        // Every object of UCX's is made after the library was found.
        Err(why) => unreachable!("UCX is used before it was loaded: {why}"),
    }
}

fn check(call: &'static str, status: Status) -> Result<()> {
    if status == Status::OK { Ok(()) } else { Err(UcxError { call, status }) }
}

/// What became of an operation that was started.
pub(super) enum Started {
    /// Its callback will be told.
    UnderWay(NonNull<c_void>),
    /// It is over, and its callback is not called.
    Over(Status),
}

fn started(pointer: *mut c_void) -> Started {
    match (Status::of_pointer(pointer), NonNull::new(pointer)) {
        (None, Some(request)) => Started::UnderWay(request),
        (status, _) => Started::Over(status.unwrap_or(Status::OK)),
    }
}

/// A context with active messages and wake-up, and these settings beside those of the user's
/// variables.
///
/// # Safety
///
/// The library has been loaded. The context ends with [`cleanup`].
pub(super) unsafe fn init(processes: usize, settings: &[(&str, &str)]) -> Result<NonNull<Context>> {
    let ucx = functions();
    let mut config = null_mut();
    // SAFETY: with neither prefix nor file the variables `UCX_*` are read; `config` is this
    // frame's.
    check("ucp_config_read", unsafe { (ucx.ucp_config_read)(null(), null(), &mut config) })?;
    for (name, value) in settings {
        if let (Ok(name), Ok(value)) = (CString::new(*name), CString::new(*value)) {
            // SAFETY: `config` was read above, and both are strings that outlive the call.
            let status = unsafe { (ucx.ucp_config_modify)(config, name.as_ptr(), value.as_ptr()) };
            if status != Status::OK {
                tracing::debug!(
                    ?name,
                    ?value,
                    status = describe(status),
                    "UCX takes no such setting"
                );
            }
        }
    }
    // SAFETY: a structure of numbers and optional callbacks, for all of which zero is a value.
    let mut params: sys::ucp_params = unsafe { zeroed() };
    params.field_mask = u64::from(sys::ucp_params_field::UCP_PARAM_FIELD_FEATURES.0)
        | u64::from(sys::ucp_params_field::UCP_PARAM_FIELD_ESTIMATED_NUM_EPS.0);
    params.features =
        u64::from(sys::ucp_feature::UCP_FEATURE_AM.0 | sys::ucp_feature::UCP_FEATURE_WAKEUP.0);
    params.estimated_num_eps = processes as ucx1_sys::size_t;
    let mut context = null_mut();
    let (major, minor) = sys::API;
    // SAFETY: the fields named in the mask are set, and the structure is that of the version given.
    let status = unsafe { (ucx.ucp_init_version)(major, minor, &params, config, &mut context) };
    // SAFETY: read above and not used any more.
    unsafe { (ucx.ucp_config_release)(config) };
    check("ucp_init", status)?;
    made("ucp_init", context)
}

/// Whether UCX moves the memory of CUDA devices, as well as the host's.
///
/// # Safety
///
/// The context is alive.
pub(super) unsafe fn context_moves_cuda(context: NonNull<Context>) -> Result<bool> {
    // SAFETY: numbers and a text, for all of which zero is a value.
    let mut found: sys::ucp_context_attr = unsafe { zeroed() };
    found.field_mask = u64::from(sys::ucp_context_attr_field::UCP_ATTR_FIELD_MEMORY_TYPES.0);
    // SAFETY: the context lives by the caller's word; the field in the mask is one of the
    // structure's.
    check("ucp_context_query", unsafe {
        (functions().ucp_context_query)(context.as_ptr(), &mut found)
    })?;
    Ok(found.memory_types & (1 << sys::ucs_memory_type::UCS_MEMORY_TYPE_CUDA as u32) != 0)
}

/// A context of UCX's; only pointers to it exist.
pub(super) type Context = ucx1_sys::ucp_context;
/// A worker of UCX's; only pointers to it exist.
pub(super) type Worker = ucx1_sys::ucp_worker;
/// An endpoint of UCX's; only pointers to it exist.
pub(super) type Endpoint = ucx1_sys::ucp_ep;

fn made<T>(call: &'static str, pointer: *mut T) -> Result<NonNull<T>> {
    NonNull::new(pointer).ok_or(UcxError { call, status: Status(-3) })
}

/// # Safety
///
/// All workers of the context are destroyed; it is not used again.
pub(super) unsafe fn cleanup(context: NonNull<Context>) {
    // SAFETY: the caller's word.
    unsafe { (functions().ucp_cleanup)(context.as_ptr()) }
}

/// A worker that one thread at a time uses, woken by all events.
///
/// # Safety
///
/// The context is alive, and outlives the worker, which ends with [`worker_destroy`].
pub(super) unsafe fn worker_create(context: NonNull<Context>) -> Result<NonNull<Worker>> {
    // SAFETY: numbers, a mask of processors and an enumeration whose first value is zero.
    let mut params: sys::ucp_worker_params = unsafe { zeroed() };
    params.field_mask =
        u64::from(sys::ucp_worker_params_field::UCP_WORKER_PARAM_FIELD_THREAD_MODE.0);
    params.thread_mode = sys::ucs_thread_mode_t::UCS_THREAD_MODE_SINGLE;
    let mut worker = null_mut();
    // SAFETY: the context lives by the caller's word, and the field in the mask is set.
    let status = unsafe { (functions().ucp_worker_create)(context.as_ptr(), &params, &mut worker) };
    check("ucp_worker_create", status)?;
    made("ucp_worker_create", worker)
}

/// # Safety
///
/// The worker is not used again, by nobody.
pub(super) unsafe fn worker_destroy(worker: NonNull<Worker>) {
    // SAFETY: the caller's word.
    unsafe { (functions().ucp_worker_destroy)(worker.as_ptr()) }
}

/// # Safety
///
/// The worker is alive.
pub(super) unsafe fn worker_address(worker: NonNull<Worker>) -> Result<Vec<u8>> {
    let ucx = functions();
    let (mut address, mut bytes) = (null_mut(), 0);
    // SAFETY: the worker lives by the caller's word, the results are this frame's.
    let status = unsafe { (ucx.ucp_worker_get_address)(worker.as_ptr(), &mut address, &mut bytes) };
    check("ucp_worker_get_address", status)?;
    // SAFETY: UCX has put so many bytes there, and keeps them until they are released.
    let copy = unsafe { std::slice::from_raw_parts(address.cast::<u8>(), bytes) }.to_vec();
    // SAFETY: it came from this worker, and is released once.
    unsafe { (ucx.ucp_worker_release_address)(worker.as_ptr(), address) };
    Ok(copy)
}

/// The descriptor that becomes readable when an armed worker has something to do.
///
/// # Safety
///
/// The worker is alive; the descriptor is its own, and ends with it.
pub(super) unsafe fn worker_descriptor(worker: NonNull<Worker>) -> Result<c_int> {
    let mut descriptor = -1;
    // SAFETY: the worker lives by the caller's word.
    let status = unsafe { (functions().ucp_worker_get_efd)(worker.as_ptr(), &mut descriptor) };
    check("ucp_worker_get_efd", status).map(|()| descriptor)
}

/// Whether the worker is armed; where not, it has something to do first.
///
/// # Safety
///
/// The worker is alive, and this is its thread.
pub(super) unsafe fn worker_arm(worker: NonNull<Worker>) -> Result<bool> {
    // SAFETY: the caller's word.
    match unsafe { (functions().ucp_worker_arm)(worker.as_ptr()) } {
        Status::BUSY => Ok(false),
        status => check("ucp_worker_arm", status).map(|()| true),
    }
}

/// Wakes whoever waits for the worker; from any thread.
///
/// # Safety
///
/// The worker is alive.
pub(super) unsafe fn worker_signal(worker: NonNull<Worker>) -> Result<()> {
    // SAFETY: the worker lives by the caller's word; UCX documents the call as safe from any
    // thread.
    check("ucp_worker_signal", unsafe { (functions().ucp_worker_signal)(worker.as_ptr()) })
}

/// Whether that did anything.
///
/// # Safety
///
/// The worker is alive, this is its thread, and no callback of UCX's is on the stack.
pub(super) unsafe fn worker_progress(worker: NonNull<Worker>) -> bool {
    // SAFETY: the caller's word.
    unsafe { (functions().ucp_worker_progress)(worker.as_ptr()) != 0 }
}

/// Messages of this number go to `callback`, whole, with the number as its argument.
///
/// # Safety
///
/// The worker is alive, and this is its thread. `callback` can be called whenever the worker is
/// used.
pub(super) unsafe fn worker_on_message(
    worker: NonNull<Worker>,
    number: c_uint,
    callback: sys::MessageCallback,
) -> Result<()> {
    use sys::ucp_am_handler_param_field as field;
    /// `UCP_AM_FLAG_WHOLE_MSG`: no callback for parts of a message.
    const WHOLE: u32 = 1;
    // SAFETY: numbers, pointers and an optional callback, for which zero is a value.
    let mut params: sys::ucp_am_handler_param = unsafe { zeroed() };
    params.field_mask = u64::from(
        field::UCP_AM_HANDLER_PARAM_FIELD_ID.0
            | field::UCP_AM_HANDLER_PARAM_FIELD_FLAGS.0
            | field::UCP_AM_HANDLER_PARAM_FIELD_CB.0
            | field::UCP_AM_HANDLER_PARAM_FIELD_ARG.0,
    );
    params.id = number;
    params.flags = WHOLE;
    params.arg = number as usize as *mut c_void;
    // SAFETY: the types differ in the status alone, a byte in both, and in the name of a length.
    params.cb = Some(unsafe {
        std::mem::transmute::<sys::MessageCallback, MessageCallbackOfBindings>(callback)
    });
    // SAFETY: the worker lives by the caller's word, the fields in the mask are set.
    let status = unsafe { (functions().ucp_worker_set_am_recv_handler)(worker.as_ptr(), &params) };
    check("ucp_worker_set_am_recv_handler", status)
}

type MessageCallbackOfBindings = unsafe extern "C" fn(
    *mut c_void,
    *const c_void,
    ucx1_sys::size_t,
    *mut c_void,
    ucx1_sys::size_t,
    *const sys::ucp_am_recv_param_t,
) -> ucx1_sys::ucs_status_t;
type SendCallbackOfBindings =
    unsafe extern "C" fn(*mut c_void, ucx1_sys::ucs_status_t, *mut c_void);
type ReceiveCallbackOfBindings =
    unsafe extern "C" fn(*mut c_void, ucx1_sys::ucs_status_t, ucx1_sys::size_t, *mut c_void);
type ErrorCallbackOfBindings =
    unsafe extern "C" fn(*mut c_void, sys::ucp_ep_h, ucx1_sys::ucs_status_t);

/// An endpoint to the worker of that address, which ends every send when the peer fails and then
/// calls `callback` with `argument`.
///
/// # Safety
///
/// The worker is alive, and this is its thread; `address` is one that [`worker_address`] has given
/// somewhere. `callback` can be called whenever the worker is used.
pub(super) unsafe fn endpoint_create(
    worker: NonNull<Worker>,
    address: &[u8],
    callback: sys::ErrorCallback,
    argument: usize,
) -> Result<NonNull<Endpoint>> {
    use sys::ucp_ep_params_field as field;
    // SAFETY: numbers, pointers, optional callbacks and an enumeration whose first value is zero.
    let mut params: sys::ucp_ep_params = unsafe { zeroed() };
    params.field_mask = u64::from(
        field::UCP_EP_PARAM_FIELD_REMOTE_ADDRESS.0
            | field::UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE.0
            | field::UCP_EP_PARAM_FIELD_ERR_HANDLER.0,
    );
    params.address = address.as_ptr().cast();
    params.err_mode = sys::ucp_err_handling_mode_t::UCP_ERR_HANDLING_MODE_PEER;
    // SAFETY: the types differ in the status alone, a byte in both, and in the name of a length.
    params.err_handler.cb = Some(unsafe {
        std::mem::transmute::<sys::ErrorCallback, ErrorCallbackOfBindings>(callback)
    });
    params.err_handler.arg = argument as *mut c_void;
    let mut endpoint = null_mut();
    // SAFETY: the worker lives by the caller's word, the address outlives the call, the fields in
    // the mask are set.
    let status = unsafe { (functions().ucp_ep_create)(worker.as_ptr(), &params, &mut endpoint) };
    check("ucp_ep_create", status)?;
    made("ucp_ep_create", endpoint)
}

/// Closes an endpoint, at once or after what was sent has left.
///
/// # Safety
///
/// The endpoint is alive, and this is its worker's thread. It is not used again. A request is freed
/// with [`request_free`].
pub(super) unsafe fn endpoint_close(endpoint: NonNull<Endpoint>, at_once: bool) -> Started {
    /// `UCP_EP_CLOSE_FLAG_FORCE`.
    const FORCE: u32 = 1;
    // SAFETY: as in `operation`.
    let mut params: sys::ucp_request_param_t = unsafe { zeroed() };
    params.op_attr_mask = sys::ucp_op_attr_t::UCP_OP_ATTR_FIELD_FLAGS as u32;
    params.flags = if at_once { FORCE } else { 0 };
    // SAFETY: the caller's word; the field in the mask is set.
    started(unsafe { (functions().ucp_ep_close_nbx)(endpoint.as_ptr(), &params) })
}

/// How a message is sent.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Way {
    /// With its bytes, which the receiver has to copy.
    Eager,
    /// The receiver fetches the bytes from where they lie, when it has a place for them.
    Rendezvous,
}

/// Where the bytes of an operation are.
#[derive(Clone, Copy)]
pub(super) struct Bytes {
    pub(super) start: *mut c_void,
    pub(super) bytes: usize,
    /// Whether in the memory of a CUDA device; else in the host's.
    pub(super) cuda: bool,
}

fn operation(number: usize, bytes: Bytes) -> sys::ucp_request_param_t {
    use sys::ucp_op_attr_t as field;
    // SAFETY: numbers, pointers, unions of pointers and an enumeration whose first value is zero.
    let mut params: sys::ucp_request_param_t = unsafe { zeroed() };
    params.op_attr_mask = field::UCP_OP_ATTR_FIELD_CALLBACK as u32
        | field::UCP_OP_ATTR_FIELD_USER_DATA as u32
        | field::UCP_OP_ATTR_FIELD_MEMORY_TYPE as u32;
    params.user_data = number as *mut c_void;
    // Said, as UCX's own guess can be wrong.
    params.memory_type = match bytes.cuda {
        false => sys::ucs_memory_type::UCS_MEMORY_TYPE_HOST,
        true => sys::ucs_memory_type::UCS_MEMORY_TYPE_CUDA,
    };
    params
}

/// Sends a message; `callback` hears of its end with `number`.
///
/// # Safety
///
/// The endpoint is alive, and this is its worker's thread. Header and payload are where they are
/// said to be, and stay there, unchanged, until the callback was called or this has returned
/// [`Started::Over`].
pub(super) unsafe fn message_send(
    endpoint: NonNull<Endpoint>,
    id: c_uint,
    header: &[u8],
    payload: Bytes,
    way: Way,
    callback: sys::SendCallback,
    number: usize,
) -> Started {
    let mut params = operation(number, payload);
    params.op_attr_mask |= sys::ucp_op_attr_t::UCP_OP_ATTR_FIELD_FLAGS as u32;
    params.flags = match way {
        Way::Eager => sys::ucp_send_am_flags::UCP_AM_SEND_FLAG_EAGER.0,
        Way::Rendezvous => sys::ucp_send_am_flags::UCP_AM_SEND_FLAG_RNDV.0,
    };
    // SAFETY: the types differ in the status alone, a byte in both, and in the name of a length.
    params.cb.send =
        Some(unsafe { std::mem::transmute::<sys::SendCallback, SendCallbackOfBindings>(callback) });
    // SAFETY: the caller's word; the fields in the mask are set, and without a data type bytes are
    // counted.
    started(unsafe {
        (functions().ucp_am_send_nbx)(
            endpoint.as_ptr(),
            id,
            header.as_ptr().cast(),
            header.len(),
            payload.start,
            payload.bytes,
            &params,
        )
    })
}

/// Fetches the bytes that a descriptor speaks of; `callback` hears of the end with `number`.
///
/// # Safety
///
/// The worker is alive, and this is its thread. The descriptor came with a message of this
/// worker's, was kept, and is not used again. `into` is where it is said to be and stays there,
/// used by nobody, until the callback was called or this has returned [`Started::Over`]; it is as
/// long as the message said.
pub(super) unsafe fn message_fetch(
    worker: NonNull<Worker>,
    descriptor: NonNull<c_void>,
    into: Bytes,
    callback: sys::ReceiveCallback,
    number: usize,
) -> Started {
    let mut params = operation(number, into);
    // SAFETY: the types differ in the status alone, a byte in both, and in the name of a length.
    params.cb.recv_am = Some(unsafe {
        std::mem::transmute::<sys::ReceiveCallback, ReceiveCallbackOfBindings>(callback)
    });
    // SAFETY: the caller's word; the fields in the mask are set.
    started(unsafe {
        (functions().ucp_am_recv_data_nbx)(
            worker.as_ptr(),
            descriptor.as_ptr(),
            into.start,
            into.bytes,
            &params,
        )
    })
}

/// Gives up the bytes that a descriptor speaks of.
///
/// # Safety
///
/// As for [`message_fetch`].
pub(super) unsafe fn message_discard(worker: NonNull<Worker>, descriptor: NonNull<c_void>) {
    // SAFETY: the caller's word.
    unsafe { (functions().ucp_am_data_release)(worker.as_ptr(), descriptor.as_ptr()) }
}

/// How a request stands.
///
/// # Safety
///
/// The request is UCX's, and was not freed.
pub(super) unsafe fn request_status(request: NonNull<c_void>) -> Status {
    // SAFETY: the caller's word.
    unsafe { (functions().ucp_request_check_status)(request.as_ptr()) }
}

/// # Safety
///
/// The request is UCX's, and is not used again. Its callback may still be called.
pub(super) unsafe fn request_free(request: NonNull<c_void>) {
    // SAFETY: the caller's word.
    unsafe { (functions().ucp_request_free)(request.as_ptr()) }
}

/// What UCX says of a context.
///
/// # Safety
///
/// The context is alive, and used by no other thread meanwhile.
pub(super) unsafe fn context_info(context: NonNull<Context>) -> String {
    // SAFETY: the caller's word.
    printed(|file| unsafe { (functions().ucp_context_print_info)(context.as_ptr(), file) })
}

/// What UCX says of an endpoint: which transports carry what.
///
/// # Safety
///
/// The endpoint is alive, and this is its worker's thread.
pub(super) unsafe fn endpoint_info(endpoint: NonNull<Endpoint>) -> String {
    // SAFETY: the caller's word.
    printed(|file| unsafe { (functions().ucp_ep_print_info)(endpoint.as_ptr(), file) })
}

/// What is printed to a stream of C's.
fn printed(print: impl FnOnce(*mut libc::FILE)) -> String {
    let (mut text, mut bytes) = (null_mut(), 0);
    // SAFETY: both are this frame's and outlive the stream, which is closed below.
    let file = unsafe { libc::open_memstream(&mut text, &mut bytes) };
    if file.is_null() {
        return String::new();
    }
    print(file);
    // SAFETY: the stream is open, and not used again. Closing it puts what was printed, and its
    // length, into the two variables.
    unsafe { libc::fclose(file) };
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the stream has left a buffer of so many bytes there.
    let words = unsafe { std::slice::from_raw_parts(text.cast::<u8>(), bytes) };
    let words = String::from_utf8_lossy(words).into_owned();
    // SAFETY: the buffer is the caller's to free, with C's allocator.
    unsafe { libc::free(text.cast()) };
    words
}
