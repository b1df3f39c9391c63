//! The driver's settings, read once from the environment.

use std::str::FromStr;
use std::sync::LazyLock;
use std::time::Duration;

use crate::faults::What;

/// All settings; the crate's documentation describes them.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Settings {
    pub(crate) devices: u32,
    pub(crate) memory: u64,
    pub(crate) pace: Pace,
    pub(crate) abort_on_race: bool,
    pub(crate) fail: Vec<(What, u64)>,
    pub(crate) compiler: String,
}

/// When streams do their work.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Pace {
    /// As soon as possible.
    Eager,
    /// When a thread waits for the work or queries it, or after this time.
    Lazy(Duration),
    /// After random short pauses, from this seed.
    Seed(u64),
}

/// Returns the settings of this process. Aborts the process if a variable has a wrong value.
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
            let Some(value) = value else { return Ok(default) };
            value.parse().map_err(|_| format!("{name}={value:?} is not a number"))
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
    fn wrong_setting_error_names_value() {
        let wrong =
            Settings::from(|name| (name == "SOFTCUDA_PACE").then(|| "quick".into())).unwrap_err();
        assert!(wrong.contains("quick"), "{wrong}");
        assert!(Settings::from(|name| (name == "SOFTCUDA_DEVICES").then(|| "x".into())).is_err());
    }
}
