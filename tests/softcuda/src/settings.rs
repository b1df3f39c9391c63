//! What the environment says about this driver, read once.

use std::path::PathBuf;
use std::str::FromStr;
use std::sync::LazyLock;
use std::time::Duration;

use crate::faults::What;

/// All settings; the crate's documentation says what they do.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Settings {
    pub(crate) devices: u32,
    pub(crate) memory: u64,
    pub(crate) pace: Pace,
    pub(crate) abort_on_race: bool,
    pub(crate) fail: Vec<(What, u64)>,
    pub(crate) compiler: String,
    pub(crate) cache: Option<PathBuf>,
}

/// When streams do their work.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Pace {
    /// As soon as they can.
    Eager,
    /// When somebody asks for it, or after this long.
    Lazy(Duration),
    /// With random short pauses, from this seed.
    Seed(u64),
}

/// The settings of this process.
pub(crate) fn settings() -> &'static Settings {
    static SETTINGS: LazyLock<Settings> = LazyLock::new(|| {
        Settings::from(|name| std::env::var(name).ok()).unwrap_or_else(|wrong| {
            // Nobody to give an error to: the process was started wrongly.
            eprintln!("softcuda: {wrong}");
            std::process::abort()
        })
    });
    &SETTINGS
}

impl Settings {
    fn from(variable: impl Fn(&str) -> Option<String>) -> Result<Settings, String> {
        fn number<T: FromStr>(name: &str, value: Option<String>, default: T) -> Result<T, String> {
            let Some(value) = value else { return Ok(default) };
            value.parse().map_err(|_| format!("{name}={value:?} is no number"))
        }
        Ok(Settings {
            devices: number("SOFTCUDA_DEVICES", variable("SOFTCUDA_DEVICES"), 1)?,
            memory: number("SOFTCUDA_MEMORY", variable("SOFTCUDA_MEMORY"), 4 << 30)?,
            pace: pace(&variable("SOFTCUDA_PACE").unwrap_or_else(|| "eager".into()))?,
            abort_on_race: match variable("SOFTCUDA_RACES").as_deref() {
                None | Some("count") => false,
                Some("abort") => true,
                Some(other) => {
                    return Err(format!(
                        "SOFTCUDA_RACES={other:?} is neither \"count\" nor \"abort\""
                    ));
                }
            },
            fail: crate::faults::plan(&variable("SOFTCUDA_FAIL").unwrap_or_default())?,
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
        Some(("lazy", ms)) => {
            Ok(Pace::Lazy(Duration::from_millis(ms.parse().map_err(|_| wrong())?)))
        }
        Some(("seed", seed)) => Ok(Pace::Seed(seed.parse().map_err(|_| wrong())?)),
        _ => Err(wrong()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_have_defaults_and_are_read() {
        let none = Settings::from(|_| None).unwrap();
        assert_eq!((none.devices, none.pace, none.abort_on_race), (1, Pace::Eager, false));
        let some = Settings::from(|name| match name {
            "SOFTCUDA_DEVICES" => Some("3".into()),
            "SOFTCUDA_PACE" => Some("seed:7".into()),
            "SOFTCUDA_RACES" => Some("abort".into()),
            _ => None,
        })
        .unwrap();
        assert_eq!((some.devices, some.pace, some.abort_on_race), (3, Pace::Seed(7), true));
    }

    #[test]
    fn a_wrong_setting_is_named() {
        let wrong =
            Settings::from(|name| (name == "SOFTCUDA_PACE").then(|| "quick".into())).unwrap_err();
        assert!(wrong.contains("quick"), "{wrong}");
        assert!(Settings::from(|name| (name == "SOFTCUDA_DEVICES").then(|| "x".into())).is_err());
    }
}
