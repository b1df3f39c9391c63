//! Rust values that live on devices: the cell that holds one, its failure and its end.
//!
//! To the rest of the framework an object is an array of one element without bytes
//! ([`ShapedArray::object`](mpmd_layout::aval::ShapedArray::object)). Its buffer leads to the
//! [`ObjectCell`] of each device. Only the device's thread uses the value, so calls are ordered as
//! they were issued.

use std::any::Any;
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock, Weak};

use mpmd_base::block::{Mutex, MutexGuard};
use mpmd_memory::SharedBuffer;
use mpmd_memory::{Loan, Reservation};
use mpmd_proto::Failure;

use crate::error::{ViewError, panic_text};
use crate::exec::Runtime;
use crate::exec::waits::in_flight::{OnLoan, Reading};
use crate::warning::warn_user;

/// A function that returns the memory of a value, in bytes.
pub(crate) type Measure = fn(&(dyn Any + Send)) -> u64;

/// A new value from a kernel, before it is moved into its [`ObjectCell`].
pub(crate) struct NewObject {
    value: Box<dyn Any + Send>,
    type_name: &'static str,
    measure: Option<Measure>,
}

/// The storage of one device's value.
pub(crate) struct ObjectCell {
    content: Mutex<ObjectContent>,
    /// The failure of the first call that failed. Every later call gets it.
    failure: OnceLock<Arc<Failure>>,
    type_name: &'static str,
    runtime: Weak<Runtime>,
    local_index: usize,
}

struct ObjectContent {
    /// The value. `None` after it was taken out.
    value: Option<Box<dyn Any + Send>>,
    /// The declared memory of the value, which counts against the device's limit.
    memory: Option<Reservation>,
    measure: Option<Measure>,
}

impl fmt::Debug for NewObject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NewObject({})", self.type_name)
    }
}

impl fmt::Debug for ObjectCell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ObjectCell({})", self.type_name)
    }
}

/// Exclusive access to an object of type `T`, until it is dropped.
pub struct ObjectRef<'a, T> {
    content: MutexGuard<'a, ObjectContent>,
    object: PhantomData<T>,
}

impl NewObject {
    pub(crate) fn new<T: Send + 'static>(value: T, measure: Option<Measure>) -> Self {
        Self {
            value: Box::new(value),
            type_name: std::any::type_name::<T>(),
            measure,
        }
    }

    /// Moves the value into a cell on this device, with its declared memory. Returns the buffer
    /// that leads to the cell.
    pub(crate) fn into_cell(
        self,
        memory: Option<Reservation>,
        runtime: &Arc<Runtime>,
        local_index: usize,
    ) -> SharedBuffer {
        let Self {
            value,
            type_name,
            measure,
        } = self;

        let memory = memory.map(Reservation::hold);
        let content = ObjectContent {
            value: Some(value),
            memory,
            measure,
        };
        SharedBuffer::lent(Box::new(ObjectCell {
            content: Mutex::new(content),
            failure: OnceLock::new(),
            type_name,
            runtime: Arc::downgrade(runtime),
            local_index,
        }))
    }

    /// Returns an error if the value reports more bytes than `declared`.
    pub(crate) fn check(&self, declared: u64) -> Result<(), ObjectTooLarge> {
        check(self.measure, &*self.value, declared, self.type_name)
    }
}

/// An object that reports more bytes than were declared for it.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the object {type_name} reports {reported} bytes, but {declared} are declared")]
pub(crate) struct ObjectTooLarge {
    type_name: &'static str,
    reported: u64,
    declared: u64,
}

impl ObjectCell {
    /// Returns the cell that the buffer leads to. `None` if the buffer has bytes.
    pub(crate) fn of(buffer: &SharedBuffer) -> Option<&Self> {
        buffer.value()?.downcast_ref()
    }

    /// Makes every later call fail with `failure`, unless the object has failed already.
    pub(crate) fn poison(&self, failure: &Arc<Failure>) {
        self.failure.get_or_init(|| failure.clone());
    }

    /// Returns the failure of the first call that failed.
    pub(crate) fn failure(&self) -> Option<&Arc<Failure>> {
        self.failure.get()
    }

    /// Returns an error if the value reports more bytes than were declared for it.
    pub(crate) fn check(&self) -> Result<(), ObjectTooLarge> {
        let content = self.content.lock();
        let Some(value) = &content.value else {
            return Ok(());
        };
        let declared = content
            .memory
            .as_ref()
            .map_or(0, |memory| memory.bytes() as u64);
        check(content.measure, &**value, declared, self.type_name)
    }

    /// Gives access to the value.
    ///
    /// # Errors
    ///
    /// If the value has another type, was taken out, or is in use because a call has the object
    /// twice.
    pub(crate) fn access<T: 'static>(&self) -> Result<ObjectRef<'_, T>, ViewError> {
        let Some(content) = self.content.try_lock() else {
            return Err(ViewError::ObjectInUse);
        };
        match &content.value {
            None => Err(ViewError::ObjectTaken),
            Some(value) if value.is::<T>() => Ok(ObjectRef {
                content,
                object: PhantomData,
            }),
            Some(_) => Err(self.wrong_type::<T>()),
        }
    }

    /// Takes the value out of the cell. Every later access is an error.
    ///
    /// # Errors
    ///
    /// As for [`access`](Self::access).
    pub(crate) fn take<T: 'static>(&self) -> Result<T, ViewError> {
        let Some(mut content) = self.content.try_lock() else {
            return Err(ViewError::ObjectInUse);
        };
        let value = content.value.take().ok_or(ViewError::ObjectTaken)?;
        match value.downcast::<T>() {
            Ok(value) => {
                content.memory = None;
                Ok(*value)
            }
            Err(value) => {
                content.value = Some(value);
                Err(self.wrong_type::<T>())
            }
        }
    }

    /// Drops the value on this thread, unless it was taken out or is in use. A panic of the drop is
    /// caught and reported.
    pub(crate) fn discard(&self) {
        let Some(mut content) = self.content.try_lock() else {
            return;
        };
        let value = content.value.take();
        let memory = content.memory.take();
        drop(content);
        drop(ObjectEnd {
            value,
            type_name: self.type_name,
            memory,
            pending: None,
        });
    }

    fn wrong_type<T>(&self) -> ViewError {
        ViewError::ObjectType {
            asked: std::any::type_name::<T>(),
            found: self.type_name,
        }
    }
}

fn check(
    measure: Option<Measure>,
    value: &(dyn Any + Send),
    declared: u64,
    type_name: &'static str,
) -> Result<(), ObjectTooLarge> {
    match measure.map(|measure| measure(value)) {
        Some(reported) if reported > declared => Err(ObjectTooLarge {
            type_name,
            reported,
            declared,
        }),
        _ => Ok(()),
    }
}

impl Loan for ObjectCell {
    fn bytes(&self) -> &[u8] {
        &[]
    }

    fn value(&self) -> Option<&(dyn Any + Send + Sync)> {
        Some(self)
    }
}

impl<T: 'static> Deref for ObjectRef<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        let value = self
            .content
            .value
            .as_deref()
            .and_then(|value| value.downcast_ref());
        value.expect("`access` has checked the type")
    }
}

impl<T: 'static> DerefMut for ObjectRef<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        let value = self
            .content
            .value
            .as_deref_mut()
            .and_then(|value| value.downcast_mut());
        value.expect("`access` has checked the type")
    }
}

/// Queues the drop of the value on its device's thread, behind the calls that were issued before.
/// If the program has ended, drops the value on the calling thread.
impl Drop for ObjectCell {
    fn drop(&mut self) {
        let ObjectContent { value, memory, .. } = self.content.get_mut();
        let (Some(value), memory) = (value.take(), memory.take()) else {
            return;
        };

        let mut end = ObjectEnd {
            value: Some(value),
            type_name: self.type_name,
            memory,
            pending: None,
        };
        let Some(runtime) = self.runtime.upgrade() else {
            return;
        };
        let bytes = end
            .memory
            .as_ref()
            .map_or(0, |memory| memory.bytes() as u64);
        end.pending = Some(PendingDrop {
            loan: runtime.in_flight.lend(bytes),
            reading: runtime.in_flight.reading(),
        });
        runtime.run_on(self.local_index, Box::new(move || drop(end)));
    }
}

/// A value that is to be dropped. A panic of its drop is caught and reported.
struct ObjectEnd {
    value: Option<Box<dyn Any + Send>>,
    type_name: &'static str,
    memory: Option<Reservation>,
    pending: Option<PendingDrop>,
}

/// A value's pending drop. Operations may wait for its memory, and the program's end waits for the
/// drop.
#[expect(dead_code, reason = "held for its drop")]
struct PendingDrop {
    loan: OnLoan,
    reading: Reading,
}

impl Drop for ObjectEnd {
    fn drop(&mut self) {
        let value = self.value.take();
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| drop(value))) {
            let why = panic_text(&*panic);
            warn_user(&format!("the drop of an object {} {why}", self.type_name));
        }
        self.memory = None;
        self.pending = None;
    }
}
