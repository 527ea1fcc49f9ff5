// Package sim runs a hub and many nodes on one heap of events, from one seed, with faults: partitions, crashes, power
// cuts, disks that forget, clocks that lie, messages late, twice and out of order. Then it heals and holds the outcome
// against the laws 2, 3, 5, 6, 13, 14, 16 and 17 (docs/design/laws.md). Equal seeds give equal traces: there is no wall
// clock, no goroutine and no map whose order matters.
//
// Real are the pure rooms and what both sides share: plan.Compile, Check and Fitting; agent.Diff, Statuses, NextChange
// and Member.Failed; agent/hubsession, meter and spool; hub/billing, rating, usagechain, lifecycle and nodeidentity;
// protocol's signatures and verification of states and leases.
//
// Modelled, because the original is bound to SQL, Badger, containerd or QUIC, and mirrored rule by rule where it
// decides:
//
//   - hub/internal/nodes and fleet: the marks of the usage chain, sessions, the hello (intake.go)
//   - hub/internal/dispatch, instance, capacity: generations, members, claims, proofs (hub.go);
//     restore as docs/design/recovery.md says
//   - agent/internal/state: what is durable, order of generations (store.go); messages on their way (uplink.go)
//   - agent/internal/reconcile and runtime: the machine and what an action takes (machine.go, reconcile.go)
//
// Not modelled: epochs and key rotation, manifests, allocations billed by the hub, the API. Segments are chained, not
// signed.
//
// Each rule that this simulation once found missing has a name (Breakage), and left out it breaks a law: incarnation
// and fork, rewind and adopt, clock, cap, silence.
//
// Where nothing happens a node is looked at rarely. Before anything touches it, the beat that its ten-second grid would
// have had last is made up for, through the same meter.Sample: TestJumpedBeatsBillTheSame holds the two ways against
// each other.
package sim
