package accelerator

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/protocol"
)

func TestMessagesOfDriversAreJudged(t *testing.T) {
	const xid = "NVRM: Xid (PCI:0000:1B:00): "
	for text, want := range map[string]signal{
		xid + "31, pid=4711, name=python, Ch 00000008, intr 10000000. MMU Fault": {"0000:1b:00.0", appFault, "Xid 31"},
		xid + "94, pid='<unknown>', name=<unknown>, Contained: DRAM":             {"0000:1b:00.0", appFault, "Xid 94"},
		xid + "95, pid=1, Uncontained: LTC":                                      {"0000:1b:00.0", needsReset, "Xid 95"},
		xid + "119, pid=1, Timeout waiting for RPC from GSP":                     {"0000:1b:00.0", needsReset, "Xid 119"},
		xid + "79, GPU has fallen off the bus.":                                  {"0000:1b:00.0", needsService, "Xid 79"},
		xid + "63, Row Remapper: New row marked":                                 {"0000:1b:00.0", noVerdict, "Xid 63"},
		xid + "999, of a newer driver":                                           {"0000:1b:00.0", noVerdict, "Xid 999"},
		"NVRM: Xid (0000:03:00): 62, PMU Halt":                                   {"0000:03:00.0", needsReset, "Xid 62"},
		xid + "154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)": {
			"0000:1b:00.0", needsReset, "Xid 154",
		},
		xid + "154, GPU recovery action changed from 0x0 (None) to 0x1 (PF FLR)": {"0000:1b:00.0", needsReset, "Xid 154"},
		xid + "154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)": {
			"0000:1b:00.0", needsService, "Xid 154",
		},
		xid + "154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)": {
			"0000:1b:00.0", noVerdict, "Xid 154",
		},
		"amdgpu 0000:03:00.0: amdgpu: GPU reset begin!. Source:  1": {"0000:03:00.0", driverResets, "GPU reset begin"},
		"amdgpu 0000:03:00.0: amdgpu: GPU reset(2) succeeded!": {
			"0000:03:00.0", driverHasReset, "GPU reset(2) succeeded",
		},
		"amdgpu 0000:03:00.0: GPU reset(2) failed": {"0000:03:00.0", needsService, "GPU reset(2) failed"},
		"amdgpu 0000:03:00.0: amdgpu: GPU reset end with ret = -19": {
			"0000:03:00.0", needsService, "GPU reset end with ret = -19",
		},
		"amdgpu 0000:03:00.0: amdgpu: device lost from bus!": {"0000:03:00.0", needsService, "device lost from bus"},
	} {
		got, ok := readMessage(text)
		require.True(t, ok, text)
		require.Equal(t, want, got, text)
	}
	for _, text := range []string{
		"", "NVRM: loading NVIDIA UNIX x86_64 Kernel Module", "NVRM: Xid (PCI:x): 31", "amdgpu: Topology: Add dGPU node",
		// A tenant has named a file so, and runs what is no program in it.
		"app[12]: segfault at 0 ip 00007f error 14 in NVRM: Xid (PCI:0000:1B:00): 79, x[7f0000000000+1000]",
		"traps: app[12] trap invalid opcode ip:7f in amdgpu 0000:03:00.0: device lost from bus![7f0000000000+1000]",
	} {
		_, ok := readMessage(text)
		require.False(t, ok, text)
	}
}

func TestOnlyTheKernelsOwnRecordsCount(t *testing.T) {
	number, text, ok := readRecord("3,1206,5140900,-;NVRM: Xid (PCI:0000:1b:00): 79\n")
	require.True(t, ok)
	require.EqualValues(t, 1207, number)
	require.Equal(t, "NVRM: Xid (PCI:0000:1b:00): 79", text)
	for _, line := range []string{
		"12,1206,5140900,-;NVRM: Xid (PCI:0000:1b:00): 79", // a program wrote it
		" SUBSYSTEM=pci", "", "3,x,5,-;a", "3;a", "x,1,5,-;a",
	} {
		_, _, ok := readRecord(line)
		require.False(t, ok, line)
	}
}

func FuzzKernelRecord(f *testing.F) {
	f.Add("3,1206,5140900,-;NVRM: Xid (PCI:0000:1b:00): 154, a to 0x1 (GPU Reset Required)")
	f.Fuzz(func(t *testing.T, line string) {
		if _, text, ok := readRecord(line); ok {
			if s, ok := readMessage(text); ok {
				require.NotEmpty(t, s.Address)
			}
		}
	})
}

// Each failed test of an accelerator that is released again and again says why it failed last.
func TestTheReasonOfAnAcceleratorDoesNotGrow(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	r := rung{}.after(signal{Verdict: needsService, Cause: "Xid 79"}, now)
	for _, line := range []string{"first; of many", "second", "third"} {
		r = r.released(now)
		require.Equal(t, "released by an operator after Xid 79", r.Reason)
		r = r.tested(errors.New(line), now)
		require.Equal(t, "released by an operator after Xid 79; "+line, r.Reason)
	}
}

func TestTheLadderLeadsBackOrToQuarantine(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	fault := signal{Verdict: needsReset, Cause: "Xid 95"}
	step := func(r rung, answers, free bool, later time.Duration) (rung, duty) {
		now = now.Add(later)
		return r.step(answers, free, time.Minute, now)
	}
	r := rung{}.after(signal{Verdict: appFault, Cause: "Xid 31"}, now)
	require.Empty(t, r.Health)
	require.Equal(t, "Xid 31 of the app", r.Reason)

	r = r.after(fault, now)
	require.Equal(t, protocol.HealthNeedsReset, r.Health)
	r, due := step(r, true, false, time.Hour)
	require.Equal(t, noDuty, due, "a container has it")
	r, due = step(r, true, true, time.Second)
	require.Equal(t, dutyReset, due)
	require.Equal(t, r, r.after(fault, now), "the same fault again says nothing new")
	r = r.resetBy(nil, now)
	require.Equal(t, protocol.HealthTesting, r.Health)
	r, due = step(r, true, true, time.Second)
	require.Equal(t, noDuty, due)
	require.Equal(t, protocol.HealthTesting, r.Health)
	same, due := step(r, true, true, time.Minute)
	require.Equal(t, r, same)
	require.Equal(t, dutyTest, due)
	require.Equal(t, protocol.HealthQuarantined, r.tested(errors.New("bad memory"), now).Health)
	require.Equal(t, protocol.HealthNeedsReset, r.after(fault, now).tested(nil, now).Health, "a fault came in the test")
	healthy := r.tested(nil, now)
	require.Empty(t, healthy.Health)
	broken, _ := step(r, false, true, 0)
	require.Equal(t, protocol.HealthQuarantined, broken.Health, "it does not answer at the end of its test")

	for range maxResets - 1 {
		r = r.after(fault, now)
		require.Equal(t, protocol.HealthNeedsReset, r.Health)
		r = r.resetBy(nil, now)
	}
	r = r.after(fault, now)
	require.Equal(t, protocol.HealthQuarantined, r.Health, "resets do not help")
	require.Equal(t, r, r.after(signal{Verdict: driverHasReset}, now))
	released := r.released(now)
	require.Equal(t, protocol.HealthTesting, released.Health)
	require.Zero(t, released.Resets)
	require.Equal(t, protocol.HealthNeedsReset, released.after(fault, now).Health)
	again := healthy.after(fault, now.Add(2*resetWindow))
	require.Zero(t, again.Resets, "resets of long ago do not count")

	lost := rung{}.after(fault, now).after(signal{Verdict: needsService, Cause: "Xid 79"}, now)
	require.Equal(t, lost, lost.resetBy(nil, now), "the driver gave it up while it was reset")
	require.Equal(t, lost, lost.after(fault, now), "only an operator takes it out of quarantine")
	released = lost.released(now)
	require.Equal(t, released, released.resetBy(errors.New("in use"), now))

	failing := rung{}.after(fault, now).resetBy(errors.New("in use"), now)
	require.Equal(t, protocol.HealthNeedsReset, failing.Health)
	_, due = step(failing, true, true, resetRetry/2)
	require.Equal(t, noDuty, due)
	_, due = step(failing, true, true, resetRetry)
	require.Equal(t, dutyReset, due)
	for range maxResets - 1 {
		failing = failing.resetBy(errors.New("in use"), now)
	}
	require.Equal(t, protocol.HealthQuarantined, failing.Health)

	driver := rung{}.after(signal{Verdict: driverResets}, now)
	_, due = step(driver, true, true, time.Hour)
	require.Equal(t, noDuty, due, "the driver does it")
	require.Equal(t, protocol.HealthTesting, driver.after(signal{Verdict: driverHasReset}, now).Health)
	require.Equal(t, protocol.HealthQuarantined, driver.after(signal{Verdict: needsService}, now).Health)
	require.Contains(t, driver.withoutReset().withoutReset().Reason, "reset it or reboot")
}
