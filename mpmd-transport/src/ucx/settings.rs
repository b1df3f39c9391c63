//! Settings of UCX for which this transport needs other values than the defaults.
//!
//! A setting that the user has made, by a variable `UCX_*`, is never changed.

/// A setting of UCX that this transport changes unless the user has set it.
struct UcxSetting {
    key: &'static str,
    value: &'static str,
    /// The environment variables by which a user may make this setting. If the user has set one of
    /// them, this transport does not change the setting.
    variables: &'static [&'static str],
}

/// Makes UCX notice a dead peer within seconds instead of minutes.
const KEEPALIVE: UcxSetting = UcxSetting {
    key: "KEEPALIVE_INTERVAL",
    value: "2s",
    variables: &["UCX_KEEPALIVE_INTERVAL"],
};

/// Makes UCX use its POSIX shared memory transport. Without this, that transport reports that it
/// cannot detect failures, and UCX leaves it out silently.
const POSIX: UcxSetting = UcxSetting {
    key: "POSIX_ERROR_HANDLING",
    value: "y",
    variables: &["UCX_POSIX_ERROR_HANDLING"],
};
const SYSV: UcxSetting = UcxSetting {
    key: "SYSV_ERROR_HANDLING",
    value: "y",
    variables: &["UCX_SYSV_ERROR_HANDLING"],
};
/// The same as [`POSIX`] and [`SYSV`] for UCX before 1.17, where both transports share one setting.
const SHARED_MEMORY: UcxSetting = UcxSetting {
    key: "MM_ERROR_HANDLING",
    value: "y",
    variables: &["UCX_POSIX_ERROR_HANDLING", "UCX_SYSV_ERROR_HANDLING"],
};

/// Makes UCX send large payloads over TCP in parts of 256 KiB instead of 64 KiB. With failure
/// detection UCX receives such payloads part by part, and each part costs system calls.
const TCP_PARTS: UcxSetting = UcxSetting {
    key: "TCP_RX_SEG_SIZE",
    value: "256k",
    variables: &["UCX_TCP_RX_SEG_SIZE"],
};
/// The same as [`TCP_PARTS`] for UCX before 1.17, where the name of the setting has no prefix.
const TCP_PARTS_BEFORE_1_17: UcxSetting = UcxSetting {
    key: "RX_SEG_SIZE",
    ..TCP_PARTS
};

/// Returns the settings that the user has not made, as pairs of name and value, for a library of
/// `version` (major, minor, patch). `variable` looks up an environment variable.
pub(super) fn unless_set(
    version: (u32, u32, u32),
    variable: impl Fn(&str) -> Option<String>,
) -> Vec<(&'static str, &'static str)> {
    let transports = variable("UCX_TLS");
    // UCX warns about settings that nothing uses.
    let uses = |names: &[&str]| {
        transports
            .as_ref()
            .is_none_or(|allowed| allows(allowed, names))
    };

    let is_old = version < (1, 17, 0);
    let uses_shared_memory = uses(&["mm", "posix", "shm", "sm", "sysv"]);
    let shared_memory: &[UcxSetting] = match (uses_shared_memory, is_old) {
        (false, _) => &[],
        (true, true) => &[SHARED_MEMORY],
        (true, false) => &[POSIX, SYSV],
    };
    let tcp: &[UcxSetting] = match (uses(&["tcp"]), is_old) {
        (false, _) => &[],
        (true, true) => &[TCP_PARTS_BEFORE_1_17],
        (true, false) => &[TCP_PARTS],
    };

    let settings = shared_memory.iter().chain(tcp).chain([&KEEPALIVE]);
    let free = settings.filter(|setting| {
        setting
            .variables
            .iter()
            .all(|name| variable(name).is_none())
    });
    free.map(|setting| (setting.key, setting.value)).collect()
}

/// Returns a text that must be equal on all processes. It contains the library's version, and the
/// size of parts over TCP if the user has set it. UCX does not compare these sizes: larger parts
/// from a peer could exceed the receiver's memory.
pub(super) fn common(version: &str, variable: impl Fn(&str) -> Option<String>) -> String {
    let name = TCP_PARTS.variables[0];
    match variable(name) {
        None => version.to_owned(),
        // Slashes divide an address.
        Some(size) => format!("{version} with {name}={}", size.replace('/', "_")),
    }
}

/// Returns true if the value `transports` of `UCX_TLS` allows a transport with one of these names.
/// It does so if it contains such a name or `all`, or lists excluded transports.
fn allows(transports: &str, names: &[&str]) -> bool {
    let listed = |word: &str| word == "all" || names.contains(&word);
    transports.starts_with('^') || transports.split(',').any(|word| listed(word.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_of_the_user_are_not_changed() {
        let names = |version, set: &[&str]| {
            let settings = unless_set(version, |variable| {
                set.contains(&variable).then(|| "all".to_owned())
            });
            settings.into_iter().map(|(key, _)| key).collect::<Vec<_>>()
        };
        let older = ["MM_ERROR_HANDLING", "RX_SEG_SIZE", "KEEPALIVE_INTERVAL"];
        assert_eq!(names((1, 12, 1), &[]), older);
        assert_eq!(names((1, 12, 1), &["UCX_SYSV_ERROR_HANDLING"]), older[1..]);
        let newer = [
            "POSIX_ERROR_HANDLING",
            "SYSV_ERROR_HANDLING",
            "TCP_RX_SEG_SIZE",
            "KEEPALIVE_INTERVAL",
        ];
        assert_eq!(names((1, 17, 0), &["UCX_TLS"]), newer);
        assert_eq!(
            names(
                (1, 22, 0),
                &["UCX_POSIX_ERROR_HANDLING", "UCX_KEEPALIVE_INTERVAL"]
            ),
            newer[1..3]
        );
        assert_eq!(
            names((1, 12, 1), &["UCX_TCP_RX_SEG_SIZE"]),
            [older[0], older[2]]
        );
    }

    #[test]
    fn size_of_tcp_parts_is_common_to_all() {
        let size = |name: &str| (name == "UCX_TCP_RX_SEG_SIZE").then(|| "64/k".to_owned());
        assert_eq!(common("1.13.1", |_| None), "1.13.1");
        assert_eq!(
            common("1.13.1", size),
            "1.13.1 with UCX_TCP_RX_SEG_SIZE=64_k"
        );
    }

    #[test]
    fn excluded_transports_get_no_settings() {
        let count = |transports: &str| {
            unless_set((1, 22, 0), |variable| {
                (variable == "UCX_TLS").then(|| transports.to_owned())
            })
            .len()
        };
        assert_eq!([count("tcp,self"), count("rc,ud")], [2, 1]);
        assert_eq!([count("posix,self"), count("rc,sm")], [3; 2]);
        assert_eq!([count("^tcp"), count("all"), count("sm, tcp")], [4; 3]);
    }
}
