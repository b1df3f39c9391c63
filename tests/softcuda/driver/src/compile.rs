//! Compiles a kernel's source into a shared library for the CPU, with the machine's C++ compiler.

use std::collections::HashMap;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, LazyLock};

use parking_lot::Mutex;

use crate::settings::settings;
use crate::source::{Kernel, prepare};

const BEFORE: &str = include_str!("shim/before.h");
const AFTER: &str = include_str!("shim/after.h");
/// CUDA's headers that kernels may include, as (name in `#include`, text).
const HEADERS: [(&str, &str); 3] = [
    ("cuda_fp16.h", include_str!("shim/cuda_fp16.h")),
    ("cuda_bf16.h", include_str!("shim/cuda_bf16.h")),
    ("cuda_fp8.h", include_str!("shim/cuda_fp8.h")),
];

/// Flags that make a shared library.
///
/// Contracted multiply-adds would make results differ between machines. Unique symbols, such as a
/// block's shared memory in an inline function, would prevent the unloading of the library. Then
/// the next library could get the path of one that is still loaded.
const FLAGS: [&str; 14] = [
    "-std=c++17",
    "-O2",
    "-shared",
    "-fPIC",
    "-w",
    "-nostdinc++",
    "-fno-exceptions",
    "-fno-rtti",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-U_FORTIFY_SOURCE",
    "-fno-stack-protector",
    "-fno-gnu-unique",
    "-Wl,-Bsymbolic,-s",
];

/// First line of a compiled image, in place of PTX's own first line.
const MARK: &str = "// softcuda module, compiled for the CPU\n";

/// The input of a compilation, and the key of its image in the cache.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Program {
    pub(crate) source: String,
    /// File name of the source in the compiler's messages.
    pub(crate) name: String,
    /// Headers, as (name in `#include`, text).
    pub(crate) headers: Vec<(String, String)>,
    /// Options for the preprocessor only, as `-DNAME=1`.
    pub(crate) options: Vec<String>,
    /// C++ expressions for instances of template kernels that programs must find by name in the
    /// module.
    pub(crate) expressions: Vec<String>,
}

/// Compiles a program into an image: a text without zero bytes that holds a shared library in
/// hexadecimal. Runs the C++ compiler and blocks until it ends. An image compiled earlier in this
/// process is reused.
///
/// # Errors
///
/// The compiler's messages, or the reason why it cannot run.
pub(crate) fn compile(program: &Program) -> Result<Arc<Vec<u8>>, String> {
    static DONE: LazyLock<Mutex<HashMap<Program, Arc<Vec<u8>>>>> = LazyLock::new(Mutex::default);
    if let Some(done) = DONE.lock().get(program) {
        return Ok(done.clone());
    }

    let library = build(program)?;
    let mut image = Vec::with_capacity(library.len() * 2 + 64);
    image.extend_from_slice(MARK.as_bytes());
    image.extend_from_slice(format!("{:016x}\n", version()).as_bytes());
    for byte in library {
        image.extend_from_slice(format!("{byte:02x}").as_bytes());
    }
    let image = Arc::new(image);

    DONE.lock().insert(program.clone(), image.clone());
    Ok(image)
}

/// The reason why this driver cannot load an image.
#[derive(Debug, PartialEq)]
pub(crate) enum Refused {
    /// The image was not made by softcuda; for example, it is real PTX.
    Foreign,
    /// Another version of softcuda compiled it.
    OtherVersion,
    /// The image has softcuda's first line, but the rest is damaged.
    Damaged,
}

/// Decodes the bytes of the shared library in an image.
pub(crate) fn library(image: &[u8]) -> Result<Vec<u8>, Refused> {
    let rest = image
        .strip_prefix(MARK.as_bytes())
        .ok_or(Refused::Foreign)?;
    let (version_text, rest) = rest.split_at_checked(17).ok_or(Refused::Damaged)?;
    if version_text != format!("{:016x}\n", version()).as_bytes() {
        return Err(Refused::OtherVersion);
    }

    let digit = |byte: u8| (byte as char).to_digit(16).map(|digit| digit as u8);
    let pairs = rest.chunks(2).map(|pair| match pair {
        [high, low] => Some(digit(*high)? << 4 | digit(*low)?),
        _ => None,
    });
    pairs
        .collect::<Option<Vec<u8>>>()
        .filter(|bytes| bytes.starts_with(b"\x7fELF"))
        .ok_or(Refused::Damaged)
}

/// True if `first` begins like an image of softcuda. `first` must hold at least `MARK_LENGTH` bytes
/// of the image.
pub(crate) fn is_image(first: &[u8]) -> bool {
    first.starts_with(MARK.as_bytes())
}

/// Number of bytes at the start of an image that [`is_image`] compares.
pub(crate) const MARK_LENGTH: usize = MARK.len();

/// Returns a hash of the C++ text that softcuda puts around kernels, headers included. Images
/// compiled with another hash are refused.
pub(crate) fn version() -> u64 {
    let headers = HEADERS.iter().flat_map(|(_, text)| text.bytes());
    hash(BEFORE.bytes().chain(AFTER.bytes()).chain(headers))
}

/// Returns the FNV-1a hash of some bytes.
fn hash(bytes: impl Iterator<Item = u8>) -> u64 {
    bytes.fold(0xCBF2_9CE4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3)
    })
}

fn build(program: &Program) -> Result<Vec<u8>, String> {
    let folder = tempfile::Builder::new().prefix("softcuda").tempdir();
    let folder = folder.map_err(|error| format!("no temporary folder: {error}"))?;
    let path = folder.path();

    let ours = HEADERS
        .iter()
        .map(|(name, text)| ((*name).to_owned(), (*text).to_owned()));
    for (name, text) in ours.chain(program.headers.iter().cloned()) {
        let at = path.join(name);
        let above = at.parent().unwrap_or(path);
        std::fs::create_dir_all(above).map_err(|error| format!("{}: {error}", above.display()))?;
        write(&at, &text)?;
    }
    write(&path.join("kernel.cu"), &program.source)?;

    // As in NVRTC, without the host's headers: a kernel that includes one does not compile there
    // either.
    let preprocessed = run(Command::new(&settings().compiler)
        .current_dir(path)
        .args([
            "-std=c++17",
            "-x",
            "c++",
            "-E",
            "-nostdinc",
            "-nostdinc++",
            "-I.",
        ])
        .args(["-D__CUDACC__", "-D__CUDACC_RTC__", "-D__NVCC__"])
        .args(&program.options)
        .arg("kernel.cu"))
    .map_err(|log| log.replace("kernel.cu", &program.name))?;
    let prepared = prepare(&preprocessed)?;

    let mut text = String::from(BEFORE);
    text.push_str("#line 1 \"kernel.cu\"\n");
    text.push_str(&prepared.text);
    text.push_str("\n#line 1 \"softcuda\"\n");
    text.push_str(AFTER);
    text.push_str("extern \"C\" const __sc_kernel __sc_kernels[] = {\n");
    for Kernel { name, threads } in &prepared.kernels {
        text.push_str(&format!("    __SC_KERNEL({name:?}, {threads}, &{name}),\n"));
    }
    for name in &program.expressions {
        let plain = name.trim().trim_start_matches('&');
        text.push_str(&format!("    __SC_KERNEL({name:?}, 1024, &{plain}),\n"));
    }
    text.push_str("    {nullptr, nullptr, nullptr, 0, nullptr, nullptr, 0},\n};\n");

    let key = format!("{} {FLAGS:?}\n{text}", settings().compiler);
    let kept = settings()
        .cache
        .as_ref()
        .map(|folder| Kept::new(folder, &key));

    if let Some(library) = kept.as_ref().and_then(Kept::read) {
        return Ok(library);
    }

    write(&path.join("module.cc"), &text)?;
    run(Command::new(&settings().compiler)
        .current_dir(path)
        .args(FLAGS)
        .args(["-o", "module.so", "module.cc"]))
    .map_err(|log| log.replace("kernel.cu", &program.name))?;
    let library = std::fs::read(path.join("module.so"))
        .map_err(|error| format!("cannot read the compiler's output: {error}"))?;

    if let Some(kept) = kept {
        // A failure costs a compilation later.
        let _ = kept.write(&library);
    }
    Ok(library)
}

/// A compiled module in a file of the cache. The file has the length of the key, the key, and the
/// library.
struct Kept<'a> {
    folder: &'a Path,
    path: PathBuf,
    key: &'a str,
}

impl<'a> Kept<'a> {
    /// Creates the entry for `key`, which has the compiler, the flags and the source. The file's
    /// name is a hash of the key.
    fn new(folder: &'a Path, key: &'a str) -> Self {
        Self {
            folder,
            path: folder.join(format!("{:016x}", hash(key.bytes()))),
            key,
        }
    }

    /// Reads the library. `None` if there is no file, or if the file has another key.
    fn read(&self) -> Option<Vec<u8>> {
        let bytes = std::fs::read(&self.path).ok()?;
        let (length, rest) = bytes.split_first_chunk::<8>()?;
        let (key, library) =
            rest.split_at_checked(usize::try_from(u64::from_le_bytes(*length)).ok()?)?;
        (key == self.key.as_bytes()).then(|| library.to_vec())
    }

    /// Writes the library. Other processes see the whole file or no file.
    fn write(&self, library: &[u8]) -> io::Result<()> {
        std::fs::create_dir_all(self.folder)?;
        let mut file = tempfile::NamedTempFile::new_in(self.folder)?;
        file.write_all(&(self.key.len() as u64).to_le_bytes())?;
        file.write_all(self.key.as_bytes())?;
        file.write_all(library)?;
        file.persist(&self.path).map_err(|failed| failed.error)?;
        Ok(())
    }
}

fn write(path: &Path, text: &str) -> Result<(), String> {
    std::fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))
}

/// Runs the compiler until it ends. Returns its standard output as text; fails with its standard
/// error.
fn run(command: &mut Command) -> Result<String, String> {
    let compiler = &settings().compiler;
    let output = command.stdin(Stdio::null()).output().map_err(|error| {
        format!("softcuda compiles kernels with {compiler:?} (SOFTCUDA_CXX), which fails: {error}")
    })?;
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    } else {
        Err(String::from_utf8_lossy(&output.stderr).into_owned())
    }
}
