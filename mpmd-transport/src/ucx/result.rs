//! UCX's functions with a [`Result`] instead of a status.
//!
//! They are as unsafe as the functions themselves: the caller is responsible for pointers and
//! threads.

use std::ffi::{CStr, CString, c_int, c_uint, c_void};
use std::fmt;
use std::mem::zeroed;
use std::ptr::{NonNull, null, null_mut};

use super::sys::{self, Functions, UcxStatus};
use crate::transport::TransportError;

/// An error status that a UCX function returned.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct UcxError {
    call: &'static str,
    status: UcxStatus,
}

impl fmt::Display for UcxError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.call, describe(self.status))
    }
}

impl UcxError {
    /// Creates the error of the UCX function `call`, which returned `status`.
    pub(super) fn new(call: &'static str, status: UcxStatus) -> Self {
        Self { call, status }
    }

    /// Converts the error to [`TransportError::Environment`], with `doing` as the failed operation.
    pub(super) fn environment(&self, doing: impl Into<String>) -> TransportError {
        TransportError::Environment {
            doing: doing.into(),
            why: self.to_string(),
        }
    }
}

type Result<T> = std::result::Result<T, UcxError>;

/// Returns UCX's text for a status, with its number.
pub(super) fn describe(status: UcxStatus) -> String {
    let Ok(library) = sys::library() else {
        return format!("status {}", status.0);
    };
    // UCX writes texts of unknown values into one static buffer.
    static ONE_AT_A_TIME: parking_lot::Mutex<()> = parking_lot::Mutex::new(());
    let _alone = ONE_AT_A_TIME.lock();
    // SAFETY: the function takes any number. It returns a string that lives as long as the library;
    // for unknown numbers, until the next call, which the lock prevents. The string is copied here.
    let words = unsafe {
        let words = (library.functions.ucs_status_string)(status);
        (!words.is_null()).then(|| CStr::from_ptr(words).to_string_lossy().into_owned())
    };
    format!("{} ({})", words.unwrap_or_default(), status.0)
}

/// Returns the functions of the UCX library, which must have been loaded.
fn functions() -> &'static Functions {
    match sys::library() {
        Ok(library) => &library.functions,
        // Every object of UCX is created after the library was loaded.
        Err(why) => unreachable!("UCX is used before it was loaded: {why}"),
    }
}

fn check(call: &'static str, status: UcxStatus) -> Result<()> {
    if status == UcxStatus::OK {
        Ok(())
    } else {
        Err(UcxError { call, status })
    }
}

/// The state of a UCX operation right after it was started.
pub(super) enum StartedOperation {
    /// The operation is in progress, as this UCX request. Its callback will be called.
    UnderWay(NonNull<c_void>),
    /// The operation has ended with this status. Its callback is not called.
    Over(UcxStatus),
}

fn started(pointer: *mut c_void) -> StartedOperation {
    match (UcxStatus::of_pointer(pointer), NonNull::new(pointer)) {
        (None, Some(request)) => StartedOperation::UnderWay(request),
        (status, _) => StartedOperation::Over(status.unwrap_or(UcxStatus::OK)),
    }
}

/// Creates a UCX context for about `processes` endpoints, with active messages and wake-up.
/// `settings` are pairs of name and value, applied in addition to the user's environment variables.
///
/// # Safety
///
/// The library has been loaded. The caller ends the context with [`cleanup`].
pub(super) unsafe fn init(processes: usize, settings: &[(&str, &str)]) -> Result<NonNull<Context>> {
    let ucx = functions();
    let mut config = null_mut();
    // SAFETY: with neither prefix nor file, UCX reads the variables `UCX_*`. `config` is a local
    // variable.
    check("ucp_config_read", unsafe {
        (ucx.ucp_config_read)(null(), null(), &mut config)
    })?;

    for (name, value) in settings {
        if let (Ok(name), Ok(value)) = (CString::new(*name), CString::new(*value)) {
            // SAFETY: `config` was read above, and both strings outlive the call.
            let status = unsafe { (ucx.ucp_config_modify)(config, name.as_ptr(), value.as_ptr()) };
            if status != UcxStatus::OK {
                tracing::debug!(
                    ?name,
                    ?value,
                    status = describe(status),
                    "UCX takes no such setting"
                );
            }
        }
    }

    // SAFETY: the structure has numbers and optional callbacks; zero is valid for all of them.
    let mut params: sys::ucp_params = unsafe { zeroed() };
    params.field_mask = u64::from(sys::ucp_params_field::UCP_PARAM_FIELD_FEATURES.0)
        | u64::from(sys::ucp_params_field::UCP_PARAM_FIELD_ESTIMATED_NUM_EPS.0);
    params.features =
        u64::from(sys::ucp_feature::UCP_FEATURE_AM.0 | sys::ucp_feature::UCP_FEATURE_WAKEUP.0);
    params.estimated_num_eps = processes as ucx1_sys::size_t;

    let mut context = null_mut();
    let (major, minor) = sys::API;
    // SAFETY: the fields in the mask are set, and the structure belongs to the version given.
    let status = unsafe { (ucx.ucp_init_version)(major, minor, &params, config, &mut context) };
    // SAFETY: it was read above and is not used any more.
    unsafe { (ucx.ucp_config_release)(config) };
    check("ucp_init", status)?;
    made("ucp_init", context)
}

/// Returns true if UCX can move memory of CUDA devices as well as host memory.
///
/// # Safety
///
/// The context is alive.
pub(super) unsafe fn context_moves_cuda(context: NonNull<Context>) -> Result<bool> {
    // SAFETY: the structure has numbers and a text; zero is valid for all of them.
    let mut found: sys::ucp_context_attr = unsafe { zeroed() };
    found.field_mask = u64::from(sys::ucp_context_attr_field::UCP_ATTR_FIELD_MEMORY_TYPES.0);
    // SAFETY: the caller guarantees that the context is alive; the field in the mask belongs to the
    // structure.
    check("ucp_context_query", unsafe {
        (functions().ucp_context_query)(context.as_ptr(), &mut found)
    })?;
    Ok(found.memory_types & (1 << sys::ucs_memory_type::UCS_MEMORY_TYPE_CUDA as u32) != 0)
}

/// The type of a UCX context (`ucp_context`). It is opaque and used only through pointers.
pub(super) type Context = ucx1_sys::ucp_context;
/// The type of a UCX worker (`ucp_worker`). It is opaque and used only through pointers.
pub(super) type Worker = ucx1_sys::ucp_worker;
/// The type of a UCX endpoint (`ucp_ep`). It is opaque and used only through pointers.
pub(super) type Endpoint = ucx1_sys::ucp_ep;

fn made<T>(call: &'static str, pointer: *mut T) -> Result<NonNull<T>> {
    NonNull::new(pointer).ok_or(UcxError {
        call,
        status: UcxStatus(-3),
    })
}

/// Destroys a context.
///
/// # Safety
///
/// All workers of the context are destroyed; it is not used again.
pub(super) unsafe fn cleanup(context: NonNull<Context>) {
    // SAFETY: guaranteed by the caller.
    unsafe { (functions().ucp_cleanup)(context.as_ptr()) }
}

/// Creates a worker that one thread may use. Every kind of event wakes it.
///
/// # Safety
///
/// The context is alive and outlives the worker. The caller ends the worker with
/// [`worker_destroy`].
pub(super) unsafe fn worker_create(context: NonNull<Context>) -> Result<NonNull<Worker>> {
    // SAFETY: the structure has numbers, a mask of processors and an enumeration; zero is valid for
    // all of them.
    let mut params: sys::ucp_worker_params = unsafe { zeroed() };
    params.field_mask =
        u64::from(sys::ucp_worker_params_field::UCP_WORKER_PARAM_FIELD_THREAD_MODE.0);
    params.thread_mode = sys::ucs_thread_mode_t::UCS_THREAD_MODE_SINGLE;
    let mut worker = null_mut();
    // SAFETY: the caller guarantees that the context is alive, and the field in the mask is set.
    let status = unsafe { (functions().ucp_worker_create)(context.as_ptr(), &params, &mut worker) };
    check("ucp_worker_create", status)?;
    made("ucp_worker_create", worker)
}

/// Destroys a worker.
///
/// # Safety
///
/// The worker is alive, and no thread uses it again.
pub(super) unsafe fn worker_destroy(worker: NonNull<Worker>) {
    // SAFETY: guaranteed by the caller.
    unsafe { (functions().ucp_worker_destroy)(worker.as_ptr()) }
}

/// Returns a copy of the worker's address.
///
/// # Safety
///
/// The worker is alive.
pub(super) unsafe fn worker_address(worker: NonNull<Worker>) -> Result<Vec<u8>> {
    let ucx = functions();
    let mut address = null_mut();
    let mut bytes = 0;
    // SAFETY: the caller guarantees that the worker is alive; the results go to local variables.
    let status = unsafe { (ucx.ucp_worker_get_address)(worker.as_ptr(), &mut address, &mut bytes) };
    check("ucp_worker_get_address", status)?;

    // SAFETY: UCX has put `bytes` bytes there and keeps them until they are released.
    let copy = unsafe { std::slice::from_raw_parts(address.cast::<u8>(), bytes) }.to_vec();
    // SAFETY: the address came from this worker, and is released once.
    unsafe { (ucx.ucp_worker_release_address)(worker.as_ptr(), address) };
    Ok(copy)
}

/// Returns the descriptor that becomes readable when an armed worker has work.
///
/// # Safety
///
/// The worker is alive. The descriptor belongs to the worker and is closed with it.
pub(super) unsafe fn worker_descriptor(worker: NonNull<Worker>) -> Result<c_int> {
    let mut descriptor = -1;
    // SAFETY: the caller guarantees that the worker is alive.
    let status = unsafe { (functions().ucp_worker_get_efd)(worker.as_ptr(), &mut descriptor) };
    check("ucp_worker_get_efd", status).map(|()| descriptor)
}

/// Arms the worker: its descriptor becomes readable at the next work. Returns false, and does not
/// arm it, if the worker has work to do first.
///
/// # Safety
///
/// The worker is alive, and this is its thread.
pub(super) unsafe fn worker_arm(worker: NonNull<Worker>) -> Result<bool> {
    // SAFETY: guaranteed by the caller.
    match unsafe { (functions().ucp_worker_arm)(worker.as_ptr()) } {
        UcxStatus::BUSY => Ok(false),
        status => check("ucp_worker_arm", status).map(|()| true),
    }
}

/// Wakes the thread that sleeps on the worker's descriptor. Any thread may call it.
///
/// # Safety
///
/// The worker is alive.
pub(super) unsafe fn worker_signal(worker: NonNull<Worker>) -> Result<()> {
    // SAFETY: the caller guarantees that the worker is alive; UCX documents the call as safe from
    // any thread.
    check("ucp_worker_signal", unsafe {
        (functions().ucp_worker_signal)(worker.as_ptr())
    })
}

/// Calls UCX's progress function once. Returns true if it did any work.
///
/// # Safety
///
/// The worker is alive, this is its thread, and no callback of UCX is on the stack.
pub(super) unsafe fn worker_progress(worker: NonNull<Worker>) -> bool {
    // SAFETY: guaranteed by the caller.
    unsafe { (functions().ucp_worker_progress)(worker.as_ptr()) != 0 }
}

/// Registers `callback` for messages with the id `number`. It gets whole messages, with the id as
/// its first argument.
///
/// # Safety
///
/// The worker is alive, and this is its thread. `callback` may be called during every call that
/// uses the worker.
pub(super) unsafe fn worker_on_message(
    worker: NonNull<Worker>,
    number: c_uint,
    callback: sys::MessageCallback,
) -> Result<()> {
    use sys::ucp_am_handler_param_field as field;
    /// `UCP_AM_FLAG_WHOLE_MSG`: the callback is called once per message, not for parts of it.
    const WHOLE: u32 = 1;

    // SAFETY: the structure has numbers, pointers and an optional callback; zero is valid for all
    // of them.
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

    // SAFETY: the types differ only in the type of the status, a byte in both, and in the name of a
    // length type.
    params.cb = Some(unsafe {
        std::mem::transmute::<sys::MessageCallback, MessageCallbackOfBindings>(callback)
    });

    // SAFETY: the caller guarantees that the worker is alive; the fields in the mask are set.
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

/// Connects to the worker with this address. When the peer fails, UCX ends every send to it, then
/// calls `callback` with `argument`.
///
/// # Safety
///
/// The worker is alive, and this is its thread. `address` is a result of [`worker_address`] in some
/// process. `callback` may be called during every call that uses the worker.
pub(super) unsafe fn endpoint_create(
    worker: NonNull<Worker>,
    address: &[u8],
    callback: sys::ErrorCallback,
    argument: usize,
) -> Result<NonNull<Endpoint>> {
    use sys::ucp_ep_params_field as field;

    // SAFETY: the structure has numbers, pointers, optional callbacks and an enumeration; zero is
    // valid for all of them.
    let mut params: sys::ucp_ep_params = unsafe { zeroed() };
    params.field_mask = u64::from(
        field::UCP_EP_PARAM_FIELD_REMOTE_ADDRESS.0
            | field::UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE.0
            | field::UCP_EP_PARAM_FIELD_ERR_HANDLER.0,
    );
    params.address = address.as_ptr().cast();
    params.err_mode = sys::ucp_err_handling_mode_t::UCP_ERR_HANDLING_MODE_PEER;

    // SAFETY: the types differ only in the type of the status, a byte in both, and in the name of a
    // length type.
    params.err_handler.cb = Some(unsafe {
        std::mem::transmute::<sys::ErrorCallback, ErrorCallbackOfBindings>(callback)
    });
    params.err_handler.arg = argument as *mut c_void;

    let mut endpoint = null_mut();
    // SAFETY: the caller guarantees that the worker is alive. The address outlives the call, and
    // the fields in the mask are set.
    let status = unsafe { (functions().ucp_ep_create)(worker.as_ptr(), &params, &mut endpoint) };
    check("ucp_ep_create", status)?;
    made("ucp_ep_create", endpoint)
}

/// Closes an endpoint: at once, or after everything sent over it has left. The caller must free a
/// returned request with [`request_free`].
///
/// # Safety
///
/// The endpoint is alive and is not used again. This is its worker's thread.
pub(super) unsafe fn endpoint_close(
    endpoint: NonNull<Endpoint>,
    at_once: bool,
) -> StartedOperation {
    /// `UCP_EP_CLOSE_FLAG_FORCE`: close without waiting for operations.
    const FORCE: u32 = 1;
    // SAFETY: as in `operation`.
    let mut params: sys::ucp_request_param_t = unsafe { zeroed() };
    params.op_attr_mask = sys::ucp_op_attr_t::UCP_OP_ATTR_FIELD_FLAGS as u32;
    params.flags = if at_once { FORCE } else { 0 };
    // SAFETY: guaranteed by the caller; the field in the mask is set.
    started(unsafe { (functions().ucp_ep_close_nbx)(endpoint.as_ptr(), &params) })
}

/// The protocol by which UCX sends a message's payload.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum SendProtocol {
    /// The payload is sent with the message, and the receiver copies it.
    Eager,
    /// The receiver fetches the payload from the sender's memory, once it has a buffer for it.
    Rendezvous,
}

/// The memory that an operation reads or writes.
#[derive(Clone, Copy)]
pub(super) struct OperationBytes {
    pub(super) start: *mut c_void,
    pub(super) bytes: usize,
    /// True for memory of a CUDA device, false for host memory.
    pub(super) cuda: bool,
}

/// Returns the UCX parameters of operation `number`, which uses the memory `bytes`.
fn operation(number: usize, bytes: OperationBytes) -> sys::ucp_request_param_t {
    use sys::ucp_op_attr_t as field;
    // SAFETY: the structure has numbers, pointers, unions of pointers and an enumeration; zero is
    // valid for all of them.
    let mut params: sys::ucp_request_param_t = unsafe { zeroed() };
    params.op_attr_mask = field::UCP_OP_ATTR_FIELD_CALLBACK as u32
        | field::UCP_OP_ATTR_FIELD_USER_DATA as u32
        | field::UCP_OP_ATTR_FIELD_MEMORY_TYPE as u32;
    params.user_data = number as *mut c_void;

    // Set explicitly, because UCX's own guess can be wrong.
    params.memory_type = match bytes.cuda {
        false => sys::ucs_memory_type::UCS_MEMORY_TYPE_HOST,
        true => sys::ucs_memory_type::UCS_MEMORY_TYPE_CUDA,
    };
    params
}

/// Sends a message. When the send ends, UCX calls `callback` with `number`, unless this function
/// returns [`StartedOperation::Over`].
///
/// # Safety
///
/// The endpoint is alive, and this is its worker's thread. `payload` describes valid memory. Header
/// and payload stay in place, unchanged, until the callback was called or this function has
/// returned [`StartedOperation::Over`].
pub(super) unsafe fn message_send(
    endpoint: NonNull<Endpoint>,
    id: c_uint,
    header: &[u8],
    payload: OperationBytes,
    way: SendProtocol,
    callback: sys::SendCallback,
    number: usize,
) -> StartedOperation {
    let mut params = operation(number, payload);
    params.op_attr_mask |= sys::ucp_op_attr_t::UCP_OP_ATTR_FIELD_FLAGS as u32;
    params.flags = match way {
        SendProtocol::Eager => sys::ucp_send_am_flags::UCP_AM_SEND_FLAG_EAGER.0,
        SendProtocol::Rendezvous => sys::ucp_send_am_flags::UCP_AM_SEND_FLAG_RNDV.0,
    };

    // SAFETY: the types differ only in the type of the status, a byte in both, and in the name of a
    // length type.
    params.cb.send =
        Some(unsafe { std::mem::transmute::<sys::SendCallback, SendCallbackOfBindings>(callback) });

    // SAFETY: guaranteed by the caller; the fields in the mask are set. Without a data type, the
    // length is in bytes.
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

/// Fetches the payload that a descriptor identifies. When the fetch ends, UCX calls `callback` with
/// `number`, unless this function returns [`StartedOperation::Over`].
///
/// # Safety
///
/// The worker is alive, and this is its thread. The descriptor came with a message of this worker,
/// was kept, and is not used again. `into` describes valid memory of the payload's length. It stays
/// in place, used by nothing else, until the callback was called or this function has returned
/// [`StartedOperation::Over`].
pub(super) unsafe fn message_fetch(
    worker: NonNull<Worker>,
    descriptor: NonNull<c_void>,
    into: OperationBytes,
    callback: sys::ReceiveCallback,
    number: usize,
) -> StartedOperation {
    let mut params = operation(number, into);
    // SAFETY: the types differ only in the type of the status, a byte in both, and in the name of a
    // length type.
    params.cb.recv_am = Some(unsafe {
        std::mem::transmute::<sys::ReceiveCallback, ReceiveCallbackOfBindings>(callback)
    });

    // SAFETY: guaranteed by the caller; the fields in the mask are set.
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

/// Discards the payload that a descriptor identifies.
///
/// # Safety
///
/// The conditions of [`message_fetch`] hold for the worker and the descriptor.
pub(super) unsafe fn message_discard(worker: NonNull<Worker>, descriptor: NonNull<c_void>) {
    // SAFETY: guaranteed by the caller.
    unsafe { (functions().ucp_am_data_release)(worker.as_ptr(), descriptor.as_ptr()) }
}

/// Returns the status of a request.
///
/// # Safety
///
/// The request came from UCX and has not been freed.
pub(super) unsafe fn request_status(request: NonNull<c_void>) -> UcxStatus {
    // SAFETY: guaranteed by the caller.
    unsafe { (functions().ucp_request_check_status)(request.as_ptr()) }
}

/// Frees a request. Its callback may still be called.
///
/// # Safety
///
/// The request came from UCX and is not used again.
pub(super) unsafe fn request_free(request: NonNull<c_void>) {
    // SAFETY: guaranteed by the caller.
    unsafe { (functions().ucp_request_free)(request.as_ptr()) }
}

/// Returns UCX's description of an endpoint, which names the networks that it uses.
///
/// # Safety
///
/// The endpoint is alive, and this is its worker's thread.
pub(super) unsafe fn endpoint_info(endpoint: NonNull<Endpoint>) -> String {
    // SAFETY: guaranteed by the caller.
    printed(|file| unsafe { (functions().ucp_ep_print_info)(endpoint.as_ptr(), file) })
}

/// Returns the text that `print` writes to a C stream; empty if no stream can be opened.
fn printed(print: impl FnOnce(*mut libc::FILE)) -> String {
    let mut text = null_mut();
    let mut bytes = 0;
    // SAFETY: both are local variables and outlive the stream, which is closed below.
    let file = unsafe { libc::open_memstream(&mut text, &mut bytes) };
    if file.is_null() {
        return String::new();
    }

    print(file);
    // SAFETY: the stream is open and not used again. Closing it stores the text and its length in
    // the two variables.
    unsafe { libc::fclose(file) };

    if text.is_null() {
        return String::new();
    }
    // SAFETY: the stream has left a buffer of `bytes` bytes there.
    let words = unsafe { std::slice::from_raw_parts(text.cast::<u8>(), bytes) };
    let words = String::from_utf8_lossy(words).into_owned();
    // SAFETY: the caller must free the buffer, with C's allocator.
    unsafe { libc::free(text.cast()) };
    words
}
