//! Settings of UCX for which this transport needs other values than the defaults.
//!
//! A setting that the user has made, by a variable `UCX_*`, is never changed.

/// A setting, by its name in the library's configuration.
struct Setting {
    key: &'static str,
    value: &'static str,
    /// The variables by which a user would make this setting.
    variables: &'static [&'static str],
}

/// Makes UCX notice a dead peer in seconds instead of minutes.
const KEEPALIVE: Setting =
    Setting { key: "KEEPALIVE_INTERVAL", value: "2s", variables: &["UCX_KEEPALIVE_INTERVAL"] };

/// Makes UCX use its POSIX shared memory. By default that says that it cannot detect failures, and
/// UCX leaves it out silently.
const POSIX: Setting =
    Setting { key: "POSIX_ERROR_HANDLING", value: "y", variables: &["UCX_POSIX_ERROR_HANDLING"] };
const SYSV: Setting =
    Setting { key: "SYSV_ERROR_HANDLING", value: "y", variables: &["UCX_SYSV_ERROR_HANDLING"] };
/// Before UCX 1.17, the settings of both shared memory transports go by the prefix of their common
/// table. This one setting is for both.
const SHARED_MEMORY: Setting = Setting {
    key: "MM_ERROR_HANDLING",
    value: "y",
    variables: &["UCX_POSIX_ERROR_HANDLING", "UCX_SYSV_ERROR_HANDLING"],
};

/// Returns the settings to make, as (name, value), for a library of `version` (major, minor,
/// patch). `variable` looks up an environment variable.
pub(super) fn unless_set(
    version: (u32, u32, u32),
    variable: impl Fn(&str) -> Option<String>,
) -> Vec<(&'static str, &'static str)> {
    let shared_memory: &[Setting] = match variable("UCX_TLS") {
        // UCX warns about settings that nothing uses.
        Some(transports) if !names_shared_memory(&transports) => &[],
        _ if version < (1, 17, 0) => &[SHARED_MEMORY],
        _ => &[POSIX, SYSV],
    };
    let settings = shared_memory.iter().chain([&KEEPALIVE]);
    let free =
        settings.filter(|setting| setting.variables.iter().all(|name| variable(name).is_none()));
    free.map(|setting| (setting.key, setting.value)).collect()
}

/// Returns true if a value of `UCX_TLS` allows shared memory: by one of its names, or by a list of
/// excluded transports.
fn names_shared_memory(transports: &str) -> bool {
    const NAMES: [&str; 6] = ["all", "mm", "posix", "shm", "sm", "sysv"];
    transports.starts_with('^') || transports.split(',').any(|name| NAMES.contains(&name.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_of_the_user_are_not_changed() {
        let names = |version, set: &[&str]| {
            let settings =
                unless_set(version, |variable| set.contains(&variable).then(|| "all".to_owned()));
            settings.into_iter().map(|(key, _)| key).collect::<Vec<_>>()
        };
        assert_eq!(names((1, 12, 1), &[]), ["MM_ERROR_HANDLING", "KEEPALIVE_INTERVAL"]);
        assert_eq!(names((1, 12, 1), &["UCX_SYSV_ERROR_HANDLING"]), ["KEEPALIVE_INTERVAL"]);
        let newer = ["POSIX_ERROR_HANDLING", "SYSV_ERROR_HANDLING", "KEEPALIVE_INTERVAL"];
        assert_eq!(names((1, 17, 0), &["UCX_TLS"]), newer);
        assert_eq!(
            names((1, 22, 0), &["UCX_POSIX_ERROR_HANDLING", "UCX_KEEPALIVE_INTERVAL"]),
            newer[1..2]
        );
    }

    #[test]
    fn excluded_shared_memory_gets_no_settings() {
        let count = |transports: &str| {
            unless_set((1, 22, 0), |variable| {
                (variable == "UCX_TLS").then(|| transports.to_owned())
            })
            .len()
        };
        assert_eq!([count("tcp,self"), count("rc,ud")], [1, 1]);
        assert_eq!([count("posix,self"), count("rc,sm"), count("^tcp"), count("all")], [3; 4]);
    }
}
