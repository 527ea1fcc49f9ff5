// Package sim runs a hub and many nodes on one heap of events, from one seed, with faults: partitions, crashes, power
// cuts, restored disks, wrong clocks, messages late, twice and out of order. Then it ends the faults and checks the
// laws 1, 2, 3, 5, 6, 13, 14, 15, 16 and 17 (docs/design/laws.md). Equal seeds give equal traces: there is
// no wall clock, no goroutine and no map whose order matters.
//
// The rules are the product's pure packages: hub/plan (Compile, Check, Fitting, Adopt, StateVersion, NextEpoch),
// hub/lifecycle, hub/billing, hub/rating, hub/usagechain and hub/nodeidentity; agent (Diff, Statuses, NextChange,
// NewWorkload, NewLease, StateNumber, what is recorded of each action, and how a listed container is observed, metered
// and probed),
// agent/admission, agent/policy, agent/clock, agent/hubsession, agent/meter and agent/spool; pkg/manifest; protocol's
// signatures and verification.
// TestTheSimulationDefinesNoConstantOfTheProduct keeps their numbers there, too.
//
// The adapters are modelled, because the originals are bound to SQL, Badger, containerd or QUIC:
//
//   - the tables of the ledger: package books; hub/internal/ledger's TestTheSimulationsBooksAreTheLedgers runs both
//   - watermarks, sessions and hellos, and what a restored hub still awaits (intake.go, restore.go):
//     hub/internal/nodes's TestTheSimulationTakesUsageAsTheHub runs both
//   - the rows of states, instances and members, what room they hold, and what a restored hub adopts (hub.go,
//     restore.go): hub/internal/nodes's TestTheSimulationKeepsMembersAsTheHub runs both. A member's accelerators are
//     its claims here, without an allocation between them: hub/plan decides which it gets, and the oracle checks that
//     nobody else has them
//   - who may have a slice of a shared GPU (slices.go): the claims that hub/internal/capacity leaves to an org, and the
//     containers beside which agent/internal/runtime starts none. hub/plan checks each state, the oracle claims and
//     containers
//   - the store of the node: package nodestore; agent/internal/state's TestTheSimulationsStoreIsTheNodes runs both
//   - passes and the execution of actions, as effects on a clock (reconcile.go, execute.go, machine.go):
//     agent/internal/reconcile's TestTheSimulationExecutesAsTheNode runs both at the same time, to the microsecond.
//     The original is not run here: its actions are goroutines that wait, which leave neither one order of events for
//     a seed nor this speed
//   - the session (uplink.go): agent/internal/uplink's TestTheSimulationsSessionIsTheNodes runs both at the same time.
//     Reports at every interval, the dials of a hub that is away and what the network does to messages are this
//     package's own
//
// In worlds with versions (Config.Versions), users upgrade apps and roll them back, and a node leaves a revision that
// never becomes ready for its fallback. Some manifests are signed by a stranger, some workloads deviate from theirs or
// need a feature of a later release, and owners change their policy. versions.go has the rows of revisions, which no
// test compares with those of hub/internal/instance; lifecycle.Revisions decides on both.
//
// Each restore of the hub begins an epoch (restore.go), while the last states of the lost hub are still under way. The
// oracle counts the restores and reads no epoch: a node that has taken a state of the restored hub must take none that
// was signed before. In some worlds (late, sim_test.go) nodes are cut off meanwhile, and what comes late would have the
// higher generation.
//
// Not modelled: key rotation, configs, published ports, another way to share a GPU, limits of parallel actions, probes
// that fail after readiness, volumes and attachments, the API. Segments are chained, not signed.
//
// What a member ran must be billed or in suspense, except what faults explain: each explains a span of its node's time
// (doubt.go), so no member is exempt. What is in suspense, faults must explain, too, to the second (suspense.go).
//
// Orgs also have an allocation each, which the hub bills by its own clock (reserved.go): all its time, also that in
// which the hub was away, from the wallet as long as that has money.
//
// What users, faults, backups and restores do are steps (steps.go), which can be left out one by one: a world that
// breaks a law is shrunk and printed, and kept in testdata.
//
// Each rule that this simulation once found missing has a name (Breakage); left out, it breaks a law.
//
// Where nothing happens a node runs a pass rarely. Before the next event at the node, catchUp takes the sample that was
// due last, through meter.Sample: TestSkippedSamplesBillTheSame compares that with a sample at every interval.
//
// # Speed
//
// BenchmarkEvents runs two worlds side by side and prints the events of a second and of a second of processor time:
//
//	go test ./e2e/sim -run '^$' -bench Events
//
// `make bench ROW=simulation` keeps the number of bench/results.json. One idle core does about 114,000 events in a
// second, one beside other work 85,000 to 107,000; the goal was 150,000. What remains is the product's own work: 30 %
// bills segments (hub/billing; a segment of a quiet node has about 28 records), 25 % are passes (agent.Diff,
// agent.Statuses and the maps that they take), 14 % sample and seal usage (agent/meter, agent/spool), 6 % verify
// signatures, 6 % sync nodes and 4 % collect garbage. The heap of events and the oracle take less than 4 %.
package sim
