//! Groups the arrays of a tree by the order in which they are moved.

use std::collections::HashMap;

use crate::topology::DeviceId;

/// Groups the arrays of a tree for moving. Returns the array indices of each group, in the order in
/// which the groups are moved.
///
/// `sources` gives the devices of each array, or `None` for a value that every process has. Those
/// values come first, as one group. The other arrays follow, one group for each set of devices, in
/// the order in which the sets are first seen. The order of the devices of an array does not
/// matter, nor does the array's spec.
pub fn groups_by_devices<'a>(
    sources: impl IntoIterator<Item = Option<&'a [DeviceId]>>,
) -> Vec<Vec<usize>> {
    let mut everywhere = Vec::new();
    let mut groups: Vec<Vec<usize>> = Vec::new();
    let mut known: HashMap<Vec<DeviceId>, usize> = HashMap::new();

    for (place, source) in sources.into_iter().enumerate() {
        let Some(devices) = source else {
            everywhere.push(place);
            continue;
        };
        let mut set = devices.to_vec();
        set.sort_unstable();
        let group = *known.entry(set).or_insert_with(|| {
            groups.push(Vec::new());
            groups.len() - 1
        });
        groups[group].push(place);
    }

    if !everywhere.is_empty() {
        groups.insert(0, everywhere);
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_values_come_first_then_device_sets_as_seen() {
        let [left, right, turned] =
            [[0, 1], [2, 3], [1, 0]].map(|devices: [u32; 2]| devices.map(DeviceId).to_vec());
        // a and c are on one set of devices, b on another; d is a host value.
        let sources = [Some(&left[..]), Some(&right[..]), Some(&left[..]), None];
        assert_eq!(groups_by_devices(sources), [vec![3], vec![0, 2], vec![1]]);
        let sources = [
            Some(&right[..]),
            Some(&turned[..]),
            None,
            Some(&left[..]),
            None,
        ];
        assert_eq!(
            groups_by_devices(sources),
            [vec![2, 4], vec![0], vec![1, 3]]
        );
        assert!(groups_by_devices([]).is_empty());
        assert_eq!(groups_by_devices([None, None]), [vec![0, 1]]);
    }
}
