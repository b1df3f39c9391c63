//! Copies, launches and hand-overs by single calls of the driver.

use std::time::{Duration, Instant};

use mpmd_core::cuda::Source;
use mpmd_core::{Error, Result};
use mpmd_device::cuda::direct::{
    Direct, DirectEvent, DirectFunction, DirectMemory, EventWait, Handle,
};

use super::Way;

/// Ordinal of the driver's first GPU. The first process of a job uses the same GPU.
const FIRST: u32 = 0;

/// Granularity of device memory in bytes. Smaller blocks may share a unit with other memory, and
/// another process can open only whole units.
const UNIT: usize = 2 << 20;

/// Two buffers for timed copies on the first GPU.
pub(crate) struct Copies {
    direct: Direct,
    from: DirectMemory,
    to: DirectMemory,
    bytes: usize,
}

impl Copies {
    pub(crate) fn new(way: Way, bytes: usize) -> Result<Self> {
        let direct = Direct::open(FIRST)?;
        let device = direct.allocate(bytes)?;
        let mut other = if way == Way::OnDevice {
            direct.allocate(bytes)
        } else {
            direct.host(bytes, false)
        }?;
        other.pin()?;
        let (from, to) = if way == Way::Out {
            (device, other)
        } else {
            (other, device)
        };
        Ok(Self {
            direct,
            from,
            to,
            bytes,
        })
    }

    /// Returns the mean time of one of `rounds` copies, including the wait for the last copy.
    pub(crate) fn time(&self, rounds: usize) -> Result<Duration> {
        let start = Instant::now();
        for _ in 0..rounds {
            self.direct.copy(&self.from, &self.to, self.bytes)?;
        }
        self.direct.wait()?;
        Ok(start.elapsed() / rounds as u32)
    }
}

/// A function of two pointers for timed launches on the first GPU.
pub(crate) struct Launches {
    direct: Direct,
    function: DirectFunction,
    x: DirectMemory,
    y: DirectMemory,
}

impl Launches {
    pub(crate) fn new(source: &'static Source, function: &str) -> Result<Self> {
        let direct = Direct::open(FIRST)?;
        let function = direct.function(source, function)?;
        let (x, y) = (direct.allocate(64)?, direct.allocate(64)?);
        Ok(Self {
            direct,
            function,
            x,
            y,
        })
    }

    /// Returns the mean time to issue one of `rounds` launches. Then waits for the device, outside
    /// of the measured time.
    pub(crate) fn time(&self, rounds: usize) -> Result<Duration> {
        let start = Instant::now();
        for _ in 0..rounds {
            self.function.launch(&self.x, &self.y)?;
        }
        let issued = start.elapsed();
        self.direct.wait()?;
        Ok(issued / rounds as u32)
    }
}

/// GPU memory and an event that two processes share by CUDA IPC: this process's own, and the other
/// process's.
pub(crate) struct Exchange {
    direct: Direct,
    own: (DirectMemory, DirectEvent),
    other: Option<(DirectMemory, DirectEvent)>,
    bytes: usize,
}

impl Exchange {
    pub(crate) fn new(ordinal: u32, bytes: usize) -> Result<Self> {
        let direct = Direct::open(ordinal)?;
        let own = (
            direct.allocate(bytes.next_multiple_of(UNIT))?,
            direct.event(EventWait::Interprocess)?,
        );
        direct.fill(&own.0, 1)?;
        own.1.record()?;
        direct.wait()?;
        Ok(Self {
            direct,
            own,
            other: None,
            bytes,
        })
    }

    /// Returns the IPC handles of this process's memory and event, for the other process's
    /// [`open`](Self::open).
    pub(crate) fn words(&self) -> Result<Vec<u8>> {
        Ok([self.own.0.handle()?, self.own.1.handle()?].concat())
    }

    pub(crate) fn open(&mut self, words: &[u8]) -> Result<()> {
        let no_handles = || Error::kernel("the other process shows no memory".to_owned());
        let (memory, event) = words.split_first_chunk().ok_or_else(no_handles)?;
        let event: Handle = event.try_into().map_err(|_| no_handles())?;
        let memory = self.direct.open_memory(*memory, self.bytes)?;
        self.other = Some((memory, self.direct.open_event(event)?));
        Ok(())
    }

    /// Records this process's event on the GPU.
    pub(crate) fn give(&self) -> Result<()> {
        Ok(self.own.1.record()?)
    }

    /// Makes the device wait for the other process's event, and copy its memory if `copies` is
    /// true. Then blocks until the device is done. Does nothing before [`open`](Self::open).
    pub(crate) fn take(&self, copies: bool) -> Result<()> {
        let Some((memory, event)) = &self.other else {
            return Ok(());
        };
        self.direct.come_after(event)?;
        if copies {
            self.direct.copy(memory, &self.own.0, self.bytes)?;
        }
        self.own.1.record()?;
        Ok(self.own.1.wait()?)
    }
}
