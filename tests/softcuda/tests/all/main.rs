//! Tests of the driver, one module per topic. Each test runs in a process of its own: see
//! [`softcuda::again`].

#![allow(unsafe_code)]

mod basics;
mod blas;
mod devices;
mod ipc;
mod kernels;
mod nccl;
mod order;
