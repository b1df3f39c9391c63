//! Assignment of cores to the processes of a job. A pure function.

use super::{Bind, HostCores, Unbound};

/// Returns the hardware threads of each process, in the order of processes.
///
/// With [`Bind::Core`] the shares are disjoint and about equal. A share lies within a NUMA node,
/// except if there are fewer processes than nodes. It has whole cores, except if there are fewer
/// cores than processes. With [`Bind::Numa`] a process has all of a node. In both cases the
/// processes of a node follow each other.
///
/// # Errors
///
/// The reason why the processes cannot be bound.
pub(super) fn assign(
    bind: Bind,
    host: &HostCores,
    processes: usize,
) -> Result<Vec<Vec<usize>>, Unbound> {
    let nodes: Vec<&[Vec<usize>]> =
        host.nodes.iter().map(Vec::as_slice).filter(|node| !node.is_empty()).collect();
    match bind {
        Bind::None => Err(Unbound::NotAsked),
        _ if processes > host.usable => Err(Unbound::Crowded { processes, cores: host.usable }),
        Bind::Numa if nodes.len() < 2 => Err(Unbound::OneNode),
        Bind::Numa => Ok(by_node(&nodes, processes)),
        Bind::Core => Ok(by_core(&nodes, processes)),
    }
}

fn by_node(nodes: &[&[Vec<usize>]], processes: usize) -> Vec<Vec<usize>> {
    if processes < nodes.len() {
        let node_of = |process| nodes[process * nodes.len() / processes];
        return (0..processes).map(|process| node_of(process).concat()).collect();
    }
    let counts = counts(&sizes(nodes), processes);
    let of_node = |(node, count): (&&[Vec<usize>], usize)| vec![node.concat(); count];
    nodes.iter().zip(counts).flat_map(of_node).collect()
}

fn by_core(nodes: &[&[Vec<usize>]], processes: usize) -> Vec<Vec<usize>> {
    // Threads of one core go to two processes only if there are too few cores.
    let cores: usize = nodes.iter().map(|node| node.len()).sum();
    let units: Vec<Vec<Vec<usize>>> = nodes
        .iter()
        .map(|node| match processes <= cores {
            true => node.to_vec(),
            false => node.iter().flatten().map(|thread| vec![*thread]).collect(),
        })
        .collect();
    let units: Vec<&[Vec<usize>]> = units.iter().map(Vec::as_slice).collect();
    if processes < units.len() {
        // Each process has several nodes.
        let nodes = split(&units, processes);
        return nodes.map(|nodes| nodes.concat().concat()).collect();
    }
    let counts = counts(&sizes(&units), processes);
    let of_node = |(node, count): (&&[Vec<usize>], usize)| {
        split(node, count).map(<[Vec<usize>]>::concat).collect::<Vec<_>>()
    };
    units.iter().zip(counts).flat_map(of_node).collect()
}

fn sizes(nodes: &[&[Vec<usize>]]) -> Vec<usize> {
    nodes.iter().map(|node| node.iter().map(Vec::len).sum()).collect()
}

/// Divides `processes` among nodes of these sizes, by size. `processes` is at least the number of
/// nodes and at most the sum of the sizes; so each node gets from one to as many as its size.
fn counts(sizes: &[usize], processes: usize) -> Vec<usize> {
    let mut counts = vec![1; sizes.len()];
    for _ in sizes.len()..processes {
        // The node that then has most for each of its processes, the first of equals. Fractions
        // are compared by their cross products.
        let best = (0..sizes.len()).reduce(|best, node| {
            let more = sizes[node] * (counts[best] + 1) > sizes[best] * (counts[node] + 1);
            if more { node } else { best }
        });
        if let Some(best) = best {
            counts[best] += 1;
        }
    }
    counts
}

/// Splits a list into `parts` parts. Their lengths differ by at most one; longer ones come first.
fn split<T>(all: &[T], parts: usize) -> impl Iterator<Item = &[T]> {
    let (each, longer) = (all.len() / parts, all.len() % parts);
    let start = move |part: usize| part * each + part.min(longer);
    (0..parts).map(move |part| &all[start(part)..start(part + 1)])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a host with these nodes. Every core has one thread.
    fn host(nodes: &[&[usize]]) -> HostCores {
        let node = |cores: &&[usize]| cores.iter().map(|core| vec![*core]).collect();
        let usable = nodes.iter().map(|node| node.len()).sum();
        HostCores { nodes: nodes.iter().map(node).collect(), usable }
    }

    fn by(bind: Bind, host: &HostCores, processes: usize) -> Vec<Vec<usize>> {
        assign(bind, host, processes).unwrap()
    }

    #[test]
    fn eight_cores_are_divided_among_four() {
        let host = host(&[&[0, 1, 2, 3, 4, 5, 6, 7]]);
        assert_eq!(by(Bind::Core, &host, 4), [[0, 1], [2, 3], [4, 5], [6, 7]]);
        assert_eq!(by(Bind::Core, &host, 1), [[0, 1, 2, 3, 4, 5, 6, 7]]);
    }

    #[test]
    fn first_of_two_gets_the_fifth_core() {
        let host = host(&[&[0, 1, 2, 3, 4]]);
        assert_eq!(by(Bind::Core, &host, 2), [vec![0, 1, 2], vec![3, 4]]);
    }

    #[test]
    fn shares_lie_within_a_node() {
        let host = host(&[&[0, 2, 4, 6], &[1, 3, 5, 7]]);
        assert_eq!(by(Bind::Core, &host, 2), [[0, 2, 4, 6], [1, 3, 5, 7]]);
        assert_eq!(by(Bind::Core, &host, 3), [vec![0, 2], vec![4, 6], vec![1, 3, 5, 7]]);
        assert_eq!(by(Bind::Core, &host, 8).concat(), [0, 2, 4, 6, 1, 3, 5, 7]);
        assert_eq!(by(Bind::Core, &host, 1), [[0, 2, 4, 6, 1, 3, 5, 7]]);
    }

    #[test]
    fn larger_nodes_get_more_processes() {
        let host = host(&[&[0], &[1, 2, 3, 4, 5]]);
        assert_eq!(by(Bind::Core, &host, 3), [vec![0], vec![1, 2, 3], vec![4, 5]]);
        let shares = by(Bind::Core, &host, 6);
        assert_eq!(shares, [[0], [1], [2], [3], [4], [5]]);
    }

    #[test]
    fn only_allowed_cores_are_used() {
        // The rest of node 0 and all of node 1 are not allowed.
        let host = host(&[&[2, 5], &[], &[9]]);
        assert_eq!(by(Bind::Core, &host, 2), [vec![2, 5], vec![9]]);
        assert_eq!(by(Bind::Numa, &host, 3), [vec![2, 5], vec![2, 5], vec![9]]);
    }

    #[test]
    fn threads_of_a_core_stay_together_if_they_can() {
        let nodes = vec![vec![vec![0, 4], vec![1, 5]], vec![vec![2, 6], vec![3, 7]]];
        let host = HostCores { nodes, usable: 8 };
        assert_eq!(by(Bind::Core, &host, 4), [[0, 4], [1, 5], [2, 6], [3, 7]]);
        let five = by(Bind::Core, &host, 5);
        assert_eq!(five, [vec![0, 4], vec![1], vec![5], vec![2, 6], vec![3, 7]]);
    }

    #[test]
    fn processes_of_a_node_share_it() {
        let host = host(&[&[0, 1], &[2, 3]]);
        assert_eq!(by(Bind::Numa, &host, 4), [[0, 1], [0, 1], [2, 3], [2, 3]]);
        assert_eq!(by(Bind::Numa, &host, 1), [[0, 1]]);
    }

    #[test]
    fn binding_without_effect_has_a_reason() {
        let one = host(&[&[0, 1]]);
        assert_eq!(assign(Bind::Core, &one, 3), Err(Unbound::Crowded { processes: 3, cores: 2 }));
        assert_eq!(assign(Bind::Numa, &one, 2), Err(Unbound::OneNode));
        // A limit of the container counts like missing cores.
        let limited = HostCores { usable: 1, ..one };
        assert!(matches!(assign(Bind::Core, &limited, 2), Err(Unbound::Crowded { .. })));
    }

    #[test]
    fn every_share_is_fair_on_many_machines() {
        for nodes in [&[4, 4][..], &[1, 7, 3], &[16], &[2, 2, 2, 2], &[5, 1]] {
            let mut next = 0..;
            let nodes: Vec<Vec<usize>> =
                nodes.iter().map(|cores| next.by_ref().take(*cores).collect()).collect();
            let host = host(&nodes.iter().map(Vec::as_slice).collect::<Vec<_>>());
            for processes in 1..=host.usable {
                let shares = by(Bind::Core, &host, processes);
                assert_eq!(shares.len(), processes);
                assert!(shares.iter().all(|share| !share.is_empty()), "{shares:?}");
                let all: Vec<usize> = (0..host.usable).collect();
                assert_eq!(shares.concat(), all, "each core once, in order");
                let within = |share: &Vec<usize>| {
                    nodes.iter().any(|node| share.iter().all(|core| node.contains(core)))
                };
                assert!(processes < nodes.len() || shares.iter().all(within), "{shares:?}");
            }
        }
    }
}
