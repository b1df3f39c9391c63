//! The same types in a build without CUDA: none of them can be constructed.

use std::convert::Infallible;
use std::time::Duration;

use mpmd_core::Result;
use mpmd_core::cuda::Source;
use mpmd_device::cuda::NoCuda;

use super::Way;

pub(crate) struct Copies(Infallible);
pub(crate) struct Exchange(Infallible);
pub(crate) struct Launches(Infallible);

impl Copies {
    pub(crate) fn new(_: Way, _: usize) -> Result<Self> {
        Err(NoCuda::NotBuilt.into())
    }

    pub(crate) fn time(&self, _: usize) -> Result<Duration> {
        match self.0 {}
    }
}

impl Launches {
    pub(crate) fn new(_: &'static Source, _: &str) -> Result<Self> {
        Err(NoCuda::NotBuilt.into())
    }

    pub(crate) fn time(&self, _: usize) -> Result<Duration> {
        match self.0 {}
    }
}

impl Exchange {
    pub(crate) fn new(_: u32, _: usize) -> Result<Self> {
        Err(NoCuda::NotBuilt.into())
    }

    pub(crate) fn words(&self) -> Result<Vec<u8>> {
        match self.0 {}
    }

    pub(crate) fn open(&mut self, _: &[u8]) -> Result<()> {
        match self.0 {}
    }

    pub(crate) fn give(&self) -> Result<()> {
        match self.0 {}
    }

    pub(crate) fn take(&self, _: bool) -> Result<()> {
        match self.0 {}
    }
}
