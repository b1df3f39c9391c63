//! Layers with different numbers of threads, in one process each.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Result, Tensor, Var};
use mpmd_candle::nn::{self, Mask, Module};

const CHILD: &str = "MPMD_TEST_LAYERS_CHILD";

/// Returns a variable of f32 in [-1, 1).
fn variable(shape: &[usize], seed: u64) -> Tensor {
    let mut random = fastrand::Rng::with_seed(seed);
    let values = (0..shape.iter().product()).map(|_| random.f32() * 2.0 - 1.0);
    let values = Tensor::from_vec(values.collect::<Vec<_>>(), shape, &Device::Cpu);
    Var::from_tensor(&values.unwrap())
        .unwrap()
        .as_tensor()
        .clone()
}

/// Computes the passes of a transformer block with sizes that are no multiples of the blocks of
/// kernels. Returns a hash of the bits of the loss and of all gradients.
fn hash_of_passes() -> Result<u64> {
    let (batch, time, heads, dim) = (5, 130, 4, 36);
    let width = heads * dim;
    let tokens: Vec<u32> = (0..batch * time).map(|i| (i * 31 % 300) as u32).collect();
    let tokens = Tensor::from_vec(tokens, (batch, time), &Device::Cpu)?;
    let table = variable(&[300, width], 1);
    let (gain, bias) = (variable(&[width], 2), variable(&[width], 3));
    let (qkv, qkv_bias) = (variable(&[3 * width, width], 4), variable(&[3 * width], 5));
    let (up, down) = (
        variable(&[2 * width, width], 6),
        variable(&[width, 2 * width], 7),
    );
    let angles = variable(&[time, dim / 2], 8).detach();
    let (cos, sin) = (angles.cos()?, angles.sin()?);

    let x = nn::Embedding::new(table.clone(), width).forward(&tokens)?;
    let h = nn::LayerNorm::new(gain.clone(), bias.clone(), 1e-5).forward(&x)?;
    let h = nn::Linear::new(qkv.clone(), Some(qkv_bias.clone())).forward(&h)?;
    let h = h
        .reshape((batch, time, 3, heads, dim))?
        .permute((2, 0, 3, 1, 4))?;
    let q = nn::rotary_emb::rope(&h.get(0)?, &cos, &sin)?;
    let k = nn::rotary_emb::rope_i(&h.get(1)?, &cos, &sin)?;
    let h = nn::attention(&q, &k, &h.get(2)?, Mask::Causal, 0.1)?;
    let x = (x + h.transpose(1, 2)?.reshape((batch, time, width))?)?;
    let h = nn::RmsNorm::new(gain.clone(), 1e-5).forward(&x)?;
    let h = nn::Activation::Gelu.forward(&nn::Linear::new(up.clone(), None).forward(&h)?)?;
    let h = nn::ops::softmax(&nn::ops::silu(&h)?, 2)?;
    let x = (x + nn::Linear::new(down.clone(), None).forward(&h)?)?;
    let logits = nn::Linear::new(table.clone(), None).forward(&x)?;
    let (loss, _) = nn::loss::cross_entropy_sum(&logits, &tokens, None)?;
    let gradients = loss.backward()?;

    // FNV-1a, so that the hash does not depend on the library's version.
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    for leaf in [&loss, &table, &gain, &bias, &qkv, &qkv_bias, &up, &down] {
        let values = gradients
            .get(leaf)
            .unwrap_or(leaf)
            .to_dtype(DType::F32)?
            .flatten_all()?;
        for value in values.to_vec1::<f32>()? {
            assert!(value.is_finite());
            hash = (hash ^ u64::from(value.to_bits())).wrapping_mul(0x0100_0000_01b3);
        }
    }
    Ok(hash)
}

#[test]
fn bits_are_equal_with_any_number_of_threads() {
    if std::env::var_os(CHILD).is_some() {
        let hashes = [hash_of_passes().unwrap(), hash_of_passes().unwrap()];
        println!("hash {:x} {:x}", hashes[0], hashes[1]);
        return;
    }
    let hashes = ["1", "2", "4"].map(|threads| {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "bits_are_equal_with_any_number_of_threads",
                "--nocapture",
            ])
            .env(CHILD, "")
            .env("RAYON_NUM_THREADS", threads)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let deadline = Instant::now() + Duration::from_secs(120);
        while child.try_wait().unwrap().is_none() {
            if Instant::now() > deadline {
                child.kill().unwrap();
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let output = child.wait_with_output().unwrap();
        let output = String::from_utf8(output.stdout).unwrap();
        let hashes = output.split("hash ").nth(1).expect(&output);
        hashes
            .split_whitespace()
            .take(2)
            .map(String::from)
            .collect::<Vec<_>>()
    });
    assert_eq!(hashes[0].len(), 2);
    assert_eq!(hashes[0][0], hashes[0][1], "two runs");
    assert_eq!(hashes[0], hashes[1], "1 and 2 threads");
    assert_eq!(hashes[0], hashes[2], "1 and 4 threads");
}
