package protocol

import (
	"fmt"
	"strconv"
	"strings"
)

// Vendors of accelerators.
const (
	VendorNVIDIA = "nvidia"
	VendorAMD    = "amd"
)

// Health of an accelerator. Only one that is ok may be given to a new allocation.
const (
	HealthOK = "ok"
	// HealthDegraded: it works; its memory has had errors that could not be corrected, or parts of it wait to be replaced.
	HealthDegraded = "degraded"
	// HealthFaulty: it does not work.
	HealthFaulty = "faulty"
	// HealthNeedsReset: nothing may run on it until it was reset.
	HealthNeedsReset = "needs_reset"
	// HealthTesting: it was reset and is watched before it is given to containers again.
	HealthTesting = "testing"
	// HealthQuarantined: no reset helps; it stays out of use until the node is rebooted or its hardware is replaced.
	HealthQuarantined = "quarantined"
	// HealthMissing: the node does not name it any more. Decided by the hub only.
	HealthMissing = "missing"
)

// TooHot is the reason of an accelerator that is degraded by its temperature.
const TooHot = "it is too hot"

// How the processes of one org share a GPU. MIG instances and AMD's partitions are not shared.
const (
	// SharingMPS: NVIDIA's Multi-Process Service runs the processes side by side, and limits memory and threads of each.
	SharingMPS = "mps"
	// SharingTimeSlices: the driver runs the processes in turn, and limits nothing.
	SharingTimeSlices = "time_slices"
)

// MaxSlices of one GPU: MPS serves 48 processes.
const MaxSlices = 48

// SliceID is the id of the n-th slice of a shared GPU. It names mode and number of the slices: one of another mode or
// size is another slice.
func SliceID(gpu, sharing string, slices, n int) string {
	return fmt.Sprintf("%s-%s%d-%d", gpu, sliceMode(sharing), slices, n)
}

// SliceOf reads the id of a slice: its GPU, how that is shared, and in how many slices. The number is 0 for the id of
// an accelerator that is none.
func SliceOf(id string) (gpu, sharing string, slices int) {
	parts := strings.Split(id, "-")
	if len(parts) < 3 {
		return "", "", 0
	}
	for _, sharing := range []string{SharingMPS, SharingTimeSlices} {
		number, is := strings.CutPrefix(parts[len(parts)-2], sliceMode(sharing))
		if n, err := strconv.Atoi(number); is && err == nil && n > 1 && n <= MaxSlices {
			return strings.Join(parts[:len(parts)-2], "-"), sharing, n
		}
	}
	return "", "", 0
}

func sliceMode(sharing string) string {
	if sharing == SharingMPS {
		return "mps"
	}
	return "ts"
}

// Kinds of links between accelerators.
const (
	LinkNVLink   = "nvlink"
	LinkNVSwitch = "nvswitch"
	LinkXGMI     = "xgmi"
)
