//! Settings of UCX's that this transport needs other than they are by default.
//!
//! Each is set only where the user has not set it: variables `UCX_*` go before.

/// A setting, by the name that the library's configuration has for it.
struct Setting {
    key: &'static str,
    value: &'static str,
    /// The variables by which a user would set it.
    variables: &'static [&'static str],
}

/// A dead peer is noticed in seconds and not in minutes.
const KEEPALIVE: Setting =
    Setting { key: "KEEPALIVE_INTERVAL", value: "2s", variables: &["UCX_KEEPALIVE_INTERVAL"] };

/// Shared memory by default says that it cannot detect failures, and is then left out without a
/// word.
const POSIX: Setting =
    Setting { key: "POSIX_ERROR_HANDLING", value: "y", variables: &["UCX_POSIX_ERROR_HANDLING"] };
const SYSV: Setting =
    Setting { key: "SYSV_ERROR_HANDLING", value: "y", variables: &["UCX_SYSV_ERROR_HANDLING"] };
/// Before 1.17 settings of transports go by the prefix of their common table, so that this is for
/// both.
const SHARED_MEMORY: Setting = Setting {
    key: "MM_ERROR_HANDLING",
    value: "y",
    variables: &["UCX_POSIX_ERROR_HANDLING", "UCX_SYSV_ERROR_HANDLING"],
};

/// What to set for a library of this version, with the variables that are set.
pub(super) fn unless_set(
    version: (u32, u32, u32),
    variable: impl Fn(&str) -> Option<String>,
) -> Vec<(&'static str, &'static str)> {
    let shared_memory: &[Setting] = match variable("UCX_TLS") {
        // UCX warns of settings that nothing uses.
        Some(transports) if !names_shared_memory(&transports) => &[],
        _ if version < (1, 17, 0) => &[SHARED_MEMORY],
        _ => &[POSIX, SYSV],
    };
    let settings = shared_memory.iter().chain([&KEEPALIVE]);
    let free =
        settings.filter(|setting| setting.variables.iter().all(|name| variable(name).is_none()));
    free.map(|setting| (setting.key, setting.value)).collect()
}

/// Whether a value of `UCX_TLS` lets shared memory in: by one of its names, or by naming what is
/// left out.
fn names_shared_memory(transports: &str) -> bool {
    const NAMES: [&str; 6] = ["all", "mm", "posix", "shm", "sm", "sysv"];
    transports.starts_with('^') || transports.split(',').any(|name| NAMES.contains(&name.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_user_goes_before() {
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
    fn where_shared_memory_is_left_out_nothing_is_set_for_it() {
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
