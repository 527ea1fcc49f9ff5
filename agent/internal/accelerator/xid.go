package accelerator

import (
	"regexp"
	"strconv"
	"strings"
)

// verdict is what one message of a driver means for its accelerator.
type verdict int

// The verdicts.
const (
	// noVerdict: nothing is to be done, or another message of the same error decides.
	noVerdict verdict = iota
	// appFault: the program on it made the error, or lost only its own work. The accelerator goes on.
	appFault
	// needsReset: nothing may run on it until it was reset.
	needsReset
	// driverResets: the driver resets it by itself now; what ran on it has lost its memory.
	driverResets
	// driverHasReset: that reset has succeeded.
	driverHasReset
	// needsService: no reset helps; the node has to be rebooted, or its hardware to be repaired.
	needsService
)

// xidVerdict is the immediate action for an Xid in NVIDIA's catalogue of Xids for Ampere and newer GPUs
// (docs.nvidia.com/deploy/xid-errors): RESTART_APP, RESET_GPU, RESTART_BM and CHECK_MECHANICALS. 48 has none: 94, 95,
// 63 or 64 come with it and decide. Those of NVLinks (74, 144 to 150) differ by link and are decided by 154.
func xidVerdict(xid uint64, text string) verdict {
	switch xid {
	case 8, 11, 13, 25, 31, 32, 39, 40, 41, 43, 45, 60, 68, 69, 70, 71, 72, 75, 76, 77, 80, 82, 83, 84, 85, 86, 88, 89,
		94, 96, 97, 98, 99, 100, 101, 102, 103, 104, 105, 126, 127, 128, 129, 130, 131, 132, 133, 134, 135, 139:
		return appFault
	case 46, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158:
		return needsReset
	case 54, 79:
		return needsService
	case 154:
		return recoveryVerdict(text)
	}
	return noVerdict
}

// recoveryVerdict reads Xid 154, in which the driver sums up what it needs: "GPU recovery action changed from 0x0
// (None) to 0x1 (GPU Reset Required)". The words differ between drivers.
func recoveryVerdict(text string) verdict {
	_, action, _ := strings.Cut(text, " to 0x")
	switch {
	case strings.Contains(action, "Reboot"):
		return needsService
	case strings.Contains(action, "Reset"), strings.Contains(action, "FLR"):
		return needsReset
	}
	return noVerdict
}

// signal is a message of a driver about one accelerator.
type signal struct {
	// Address is the accelerator's PCI address.
	Address string  `json:"address"`
	Verdict verdict `json:"verdict"`
	// Cause is for people.
	Cause string `json:"cause"`
}

// A driver's message begins its record. In the middle of one its words may be a tenant's, as the name of a file in
// which a program has failed.
var (
	xidMessage = regexp.MustCompile(
		`^NVRM: Xid \((?:PCI:)?([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})(?:\.[0-7])?\): ([0-9]{1,4})(.*)`)
	amdMessage = regexp.MustCompile(
		`^amdgpu ([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]): (?:amdgpu: )?(GPU reset begin!|GPU reset\([0-9]+\) ` +
			`(?:succeeded!|failed)|GPU reset end with ret = -[0-9]+|device lost from bus!)`)
)

// readMessage reads a line of the kernel's log; ok is false for one that says nothing about an accelerator. AMD's lines
// are those of amdgpu_device_gpu_recover in Linux.
func readMessage(text string) (s signal, ok bool) {
	if m := xidMessage.FindStringSubmatch(text); m != nil {
		xid, _ := strconv.ParseUint(m[2], 10, 64)
		return signal{strings.ToLower(m[1]) + ".0", xidVerdict(xid, m[3]), "Xid " + m[2]}, true
	}
	m := amdMessage.FindStringSubmatch(text)
	if m == nil {
		return signal{}, false
	}
	s = signal{Address: m[1], Verdict: needsService, Cause: strings.TrimRight(m[2], "!")}
	switch {
	case strings.HasPrefix(m[2], "GPU reset begin"):
		s.Verdict = driverResets
	case strings.HasSuffix(m[2], "succeeded!"):
		s.Verdict = driverHasReset
	}
	return s, true
}
