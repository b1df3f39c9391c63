//! The driver's settings, read once from the environment.

use std::path::PathBuf;
use std::str::FromStr;
use std::sync::LazyLock;
use std::time::Duration;

/// All settings; the crate's documentation describes them.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Settings {
    pub(crate) devices: u32,
    pub(crate) memory: u64,
    /// Maximum bytes of a block's shared memory, dynamic and declared memory together.
    pub(crate) shared: u32,
    pub(crate) pace: Pace,
    pub(crate) abort_on_race: bool,
    pub(crate) fail: Plan,
    pub(crate) block: u64,
    pub(crate) events: u64,
    pub(crate) ipc_events: u64,
    pub(crate) pins: bool,
    pub(crate) orphans_hang: bool,
    pub(crate) first: Duration,
    pub(crate) compiler: String,
    pub(crate) cache: Option<PathBuf>,
}

/// The setting for when streams run their issued work.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Pace {
    /// Runs work as soon as the work before it in the stream is done.
    Eager,
    /// Runs work when a thread waits for it or queries it, or after this time.
    Lazy(Duration),
    /// Runs some work only after a pause of up to 200 microseconds. This seed decides which.
    Seed(u64),
}

/// A kind of operation that can be made to fail.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum CallKind {
    /// An allocation of device memory, by `cuMemAlloc` or `cuMemAllocAsync`.
    Alloc,
    /// An allocation of pinned host memory; registrations do not count.
    AllocHost,
    /// A copy or a fill, when it runs.
    Copy,
    /// A kernel, a matrix product or an NCCL operation, when it runs.
    Launch,
    /// The creation of an event.
    Event,
    /// The creation of a stream.
    Stream,
    /// A compilation by NVRTC.
    Compile,
    /// A call of an exported function, by its C name; it fails with a code that suits the name.
    Function(String),
    /// A call of an exported function, by its C name; it fails with this code instead of running.
    Answer(String, u32),
}

/// The requested failures, as (kind of call, calls until the one that fails); 1 is the next call.
pub(crate) type Plan = Vec<(CallKind, u64)>;

/// Returns the settings, which the first call reads from the environment. Aborts the process if a
/// variable has a wrong value.
pub(crate) fn settings() -> &'static Settings {
    static SETTINGS: LazyLock<Settings> = LazyLock::new(|| {
        Settings::from(|name| std::env::var(name).ok()).unwrap_or_else(|wrong| {
            // No caller can take the error: the process was started with wrong settings.
            eprintln!("softcuda: {wrong}");
            std::process::abort()
        })
    });
    &SETTINGS
}

impl Settings {
    fn from(variable: impl Fn(&str) -> Option<String>) -> Result<Settings, String> {
        fn number<T: FromStr>(name: &str, value: Option<String>, default: T) -> Result<T, String> {
            let Some(value) = value else {
                return Ok(default);
            };
            value
                .parse()
                .map_err(|_| format!("{name}={value:?} is not a number"))
        }
        fn choice(
            name: &str,
            value: Option<String>,
            [default, other]: [&str; 2],
        ) -> Result<bool, String> {
            match value.as_deref() {
                None => Ok(false),
                Some(value) if value == default => Ok(false),
                Some(value) if value == other => Ok(true),
                Some(value) => Err(format!(
                    "{name}={value:?} is neither \"{default}\" nor \"{other}\""
                )),
            }
        }
        let choice = |name: &str, words| choice(name, variable(name), words);

        let first = number("SOFTCUDA_FIRST", variable("SOFTCUDA_FIRST"), 0)?;
        Ok(Settings {
            devices: number("SOFTCUDA_DEVICES", variable("SOFTCUDA_DEVICES"), 1)?,
            memory: number("SOFTCUDA_MEMORY", variable("SOFTCUDA_MEMORY"), 4 << 30)?,
            shared: number("SOFTCUDA_SHARED", variable("SOFTCUDA_SHARED"), 227 << 10)?,
            pace: pace(&variable("SOFTCUDA_PACE").unwrap_or_else(|| "eager".into()))?,
            abort_on_race: choice("SOFTCUDA_RACES", ["count", "abort"])?,
            fail: plan(&variable("SOFTCUDA_FAIL").unwrap_or_default())?,
            block: number("SOFTCUDA_BLOCK", variable("SOFTCUDA_BLOCK"), 0)?,
            events: number("SOFTCUDA_EVENTS", variable("SOFTCUDA_EVENTS"), u64::MAX)?,
            ipc_events: number(
                "SOFTCUDA_IPC_EVENTS",
                variable("SOFTCUDA_IPC_EVENTS"),
                u64::MAX,
            )?,
            pins: !choice("SOFTCUDA_PIN", ["allow", "refuse"])?,
            orphans_hang: choice("SOFTCUDA_ORPHANS", ["end", "hang"])?,
            first: Duration::from_millis(first),
            compiler: variable("SOFTCUDA_CXX").unwrap_or_else(|| "c++".into()),
            cache: variable("SOFTCUDA_CACHE").map(PathBuf::from),
        })
    }
}

fn pace(text: &str) -> Result<Pace, String> {
    let wrong = || {
        format!("SOFTCUDA_PACE={text:?} is none of eager, lazy, lazy:<milliseconds>, seed:<number>")
    };
    match text.split_once(':') {
        None if text == "eager" => Ok(Pace::Eager),
        None if text == "lazy" => Ok(Pace::Lazy(Duration::from_secs(1))),
        Some(("lazy", ms)) => Ok(Pace::Lazy(Duration::from_millis(
            ms.parse().map_err(|_| wrong())?,
        ))),
        Some(("seed", seed)) => Ok(Pace::Seed(seed.parse().map_err(|_| wrong())?)),
        _ => Err(wrong()),
    }
}

/// Parses the value of `SOFTCUDA_FAIL`: `kind:nth`, several separated by commas. An empty text
/// gives no failures.
///
/// # Errors
///
/// A message for the user that quotes the wrong part.
pub(crate) fn plan(text: &str) -> Result<Plan, String> {
    let one = |part: &str| {
        let (kind, nth) = part.split_once(':')?;
        let kind = match kind {
            "alloc" => CallKind::Alloc,
            "alloc_host" => CallKind::AllocHost,
            "copy" => CallKind::Copy,
            "launch" => CallKind::Launch,
            "event" => CallKind::Event,
            "stream" => CallKind::Stream,
            "compile" => CallKind::Compile,
            name if ["cu", "nvrtc", "nccl"]
                .iter()
                .any(|library| name.starts_with(library)) =>
            {
                match name.split_once('=') {
                    Some((name, code)) => CallKind::Answer(name.to_owned(), code.parse().ok()?),
                    None => CallKind::Function(name.to_owned()),
                }
            }
            _ => return None,
        };

        nth.parse()
            .ok()
            .filter(|nth| *nth > 0)
            .map(|nth| (kind, nth))
    };

    let known = "alloc, alloc_host, copy, launch, event, stream, compile or a function of CUDA's";
    let parts = text.split(',').filter(|part| !part.is_empty());
    parts
        .map(|part| {
            one(part).ok_or_else(|| format!("SOFTCUDA_FAIL: {part:?} is not <{known}>:<nth>"))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_have_defaults_and_are_read() {
        let none = Settings::from(|_| None).unwrap();
        assert_eq!(
            (none.devices, none.pace, none.abort_on_race),
            (1, Pace::Eager, false)
        );
        let some = Settings::from(|name| match name {
            "SOFTCUDA_DEVICES" => Some("3".into()),
            "SOFTCUDA_PACE" => Some("seed:7".into()),
            "SOFTCUDA_RACES" => Some("abort".into()),
            "SOFTCUDA_PIN" => Some("refuse".into()),
            "SOFTCUDA_ORPHANS" => Some("end".into()),
            _ => None,
        })
        .unwrap();
        assert!(none.pins && !some.pins && !some.orphans_hang);
        assert_eq!(
            (some.devices, some.pace, some.abort_on_race),
            (3, Pace::Seed(7), true)
        );
    }

    #[test]
    fn wrong_setting_error_names_value() {
        let wrong =
            Settings::from(|name| (name == "SOFTCUDA_PACE").then(|| "quick".into())).unwrap_err();
        assert!(wrong.contains("quick"), "{wrong}");
        assert!(Settings::from(|name| (name == "SOFTCUDA_DEVICES").then(|| "x".into())).is_err());
    }

    #[test]
    fn fault_plans_parse_or_name_error() {
        assert_eq!(
            plan("launch:3,alloc_host:1"),
            Ok(vec![(CallKind::Launch, 3), (CallKind::AllocHost, 1)])
        );
        assert_eq!(plan(""), Ok(Vec::new()));
        let function = CallKind::Function("cuInit".into());
        assert_eq!(plan("cuInit:1"), Ok(vec![(function, 1)]));
        let answer = CallKind::Answer("cuInit".into(), 4242);
        assert_eq!(plan("cuInit=4242:2"), Ok(vec![(answer, 2)]));
        assert!(plan("cuInit=x:2").is_err());
        assert!(plan("launch").unwrap_err().contains("launch"));
        assert!(plan("lunch:1").is_err() && plan("copy:0").is_err());
    }
}
