//! Channels.

use std::sync::Arc;
use std::sync::mpsc::{self, RecvError, SendError, TryRecvError};
use std::time::Duration;

pub use std::sync::mpsc::RecvTimeoutError;

use super::world::{self, Key};

/// Creates a channel without a size limit. Values arrive in the order in which they were sent.
pub fn channel<T>() -> (Sender<T>, Receiver<T>) {
    let (sender, receiver) = mpsc::channel();
    let channel = Arc::new(ChannelIdentity(0));
    (
        Sender {
            sender,
            wake: WakeReceiver(channel.clone()),
        },
        Receiver { receiver, channel },
    )
}

/// The sending half of a channel.
pub struct Sender<T> {
    // Dropped before `wake`: the receiver then sees that no sender is left.
    sender: mpsc::Sender<T>,
    wake: WakeReceiver,
}

/// The receiving half of a channel.
pub struct Receiver<T> {
    receiver: mpsc::Receiver<T>,
    channel: Arc<ChannelIdentity>,
}

/// A channel's identity: the address of this value.
struct ChannelIdentity(#[expect(dead_code, reason = "gives the channel an address of its own")] u8);

/// Wakes the receiver of a simulated channel, when dropped.
#[derive(Clone)]
struct WakeReceiver(Arc<ChannelIdentity>);

impl ChannelIdentity {
    fn key(&self) -> Key {
        std::ptr::from_ref(self).addr()
    }
}

impl Drop for WakeReceiver {
    fn drop(&mut self) {
        if let Some(me) = world::me() {
            me.wake_all(self.0.key());
        }
    }
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Self {
        Self {
            sender: self.sender.clone(),
            wake: self.wake.clone(),
        }
    }
}

impl<T> Sender<T> {
    /// Sends a value. Does not block.
    ///
    /// # Errors
    ///
    /// If the receiver is dropped. The error contains the value.
    #[track_caller]
    pub fn send(&self, value: T) -> Result<(), SendError<T>> {
        self.sender.send(value)?;
        if let Some(me) = world::me() {
            me.wake_all(self.wake.0.key());
            me.pause();
        }
        Ok(())
    }
}

impl<T> Receiver<T> {
    /// Blocks until the next value arrives, and returns it.
    ///
    /// # Errors
    ///
    /// If no value is left and all senders are dropped.
    pub fn recv(&self) -> Result<T, RecvError> {
        let Some(me) = world::me() else {
            return self.receiver.recv();
        };
        loop {
            match self.receiver.try_recv() {
                Ok(value) => return Ok(value),
                Err(TryRecvError::Disconnected) => return Err(RecvError),
                Err(TryRecvError::Empty) => _ = me.wait(self.channel.key(), None),
            }
        }
    }

    /// Blocks until the next value arrives, for at most `time`.
    ///
    /// # Errors
    ///
    /// After `time`, or if no value is left and all senders are dropped.
    pub fn recv_timeout(&self, time: Duration) -> Result<T, RecvTimeoutError> {
        let Some(me) = world::me() else {
            return self.receiver.recv_timeout(time);
        };
        let deadline = me.after(time);
        let mut is_late = false;
        loop {
            match self.receiver.try_recv() {
                Ok(value) => return Ok(value),
                Err(TryRecvError::Disconnected) => return Err(RecvTimeoutError::Disconnected),
                Err(TryRecvError::Empty) if is_late => return Err(RecvTimeoutError::Timeout),
                Err(TryRecvError::Empty) => is_late = !me.wait(self.channel.key(), deadline),
            }
        }
    }

    /// Returns the next value if one has arrived. Does not block.
    ///
    /// # Errors
    ///
    /// If no value has arrived.
    #[track_caller]
    pub fn try_recv(&self) -> Result<T, TryRecvError> {
        if let Some(me) = world::me() {
            me.pause();
        }
        self.receiver.try_recv()
    }

    /// Returns the values that have arrived, without waiting for more.
    pub fn try_iter(&self) -> impl Iterator<Item = T> {
        std::iter::from_fn(|| self.try_recv().ok())
    }

    /// Returns the values one by one. Blocks for each, and ends when all senders are dropped.
    pub fn iter(&self) -> impl Iterator<Item = T> {
        std::iter::from_fn(|| self.recv().ok())
    }
}

impl<T> IntoIterator for Receiver<T> {
    type Item = T;
    type IntoIter = IntoIter<T>;

    fn into_iter(self) -> IntoIter<T> {
        IntoIter(self)
    }
}

/// Iterator over the values of a channel. It ends when all senders are dropped.
pub struct IntoIter<T>(Receiver<T>);

impl<T> Iterator for IntoIter<T> {
    type Item = T;

    fn next(&mut self) -> Option<T> {
        self.0.recv().ok()
    }
}
