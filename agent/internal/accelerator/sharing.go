package accelerator

import (
	"fmt"
	"strconv"
	"strings"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

const (
	// allGPUs names every GPU that Sharing does not name itself.
	allGPUs = "all"
	// exclusive is the mode of a GPU that is not shared.
	exclusive = "exclusive"
)

// Sharing says which GPUs are shared and how, by their ids.
type Sharing map[string]sharingMode

// sharingMode is how one GPU is shared; the zero value is not at all.
type sharingMode struct {
	// sharing is one of protocol's.
	sharing string
	slices  int
}

// ParseSharing reads ID=MODE, separated by commas: ID is that of a GPU, or all; MODE is exclusive, mps:N or
// time_slices:N.
func ParseSharing(text string) (Sharing, error) {
	all := Sharing{}
	if text == "" {
		return all, nil
	}
	for part := range strings.SplitSeq(text, ",") {
		id, mode, _ := strings.Cut(part, "=")
		if _, twice := all[id]; twice || id == "" {
			return nil, sharingInvalid("%q names no GPU, or one that is named twice", part)
		}
		name, count, _ := strings.Cut(mode, ":")
		n, err := strconv.Atoi(count)
		switch {
		case mode == exclusive:
			all[id] = sharingMode{}
		case name != protocol.SharingMPS && name != protocol.SharingTimeSlices:
			return nil, sharingInvalid("%q: a GPU is %s, %s:N or %s:N", part, exclusive, protocol.SharingMPS,
				protocol.SharingTimeSlices)
		case err != nil || n < 2 || n > protocol.MaxSlices:
			return nil, sharingInvalid("%q: a GPU has from 2 to %d slices", part, protocol.MaxSlices)
		default:
			all[id] = sharingMode{name, n}
		}
	}
	return all, nil
}

func sharingInvalid(format string, args ...any) error {
	return fault.New(fault.Malformed, fault.CodeFlagInvalid, "--accelerator-sharing: "+fmt.Sprintf(format, args...)+".",
		nil)
}

// of is how the owner wants this GPU to be shared.
func (s Sharing) of(a *protocol.Accelerator) sharingMode {
	if mode, named := s[a.GetId()]; named {
		return mode
	}
	return s[allGPUs]
}

// canShare reports whether a GPU can be shared: NVIDIA's without MIG. AMD's driver has nothing that bounds a process.
func canShare(a *protocol.Accelerator) bool {
	return a.GetVendor() == protocol.VendorNVIDIA && !hasHardwareParts(a)
}

func hasHardwareParts(a *protocol.Accelerator) bool {
	return len(a.GetPartitions()) > 0 && a.GetPartitions()[0].GetSharing() == ""
}

// share returns the GPU with its slices. Their ids name mode and number: a slice of another size is another slice, and
// a container that has one of before is stopped.
func (s Sharing) share(a *protocol.Accelerator) *protocol.Accelerator {
	mode := s.of(a)
	if mode.slices == 0 || !canShare(a) {
		return a
	}
	profile := "time slice"
	if mode.sharing == protocol.SharingMPS {
		profile = "MPS"
	}
	a = proto.CloneOf(a)
	for n := range mode.slices {
		a.Partitions = append(a.Partitions, &protocol.AcceleratorPartition{
			Id:          protocol.SliceID(a.GetId(), mode.sharing, mode.slices, n),
			Profile:     fmt.Sprintf("1/%d %s", mode.slices, profile),
			MemoryBytes: a.GetMemoryBytes() / uint64(mode.slices), Sharing: mode.sharing,
		})
	}
	return a
}

// isRefused reports whether the owner wants this accelerator to be shared and it cannot be.
func (s Sharing) isRefused(a *protocol.Accelerator) bool { return s.of(a).slices > 0 && !canShare(a) }
