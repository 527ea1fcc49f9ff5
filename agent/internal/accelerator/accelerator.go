// Package accelerator takes the inventory of the machine's accelerators, notices when it changes, and says what a
// container needs to use some of them. It gives them to no container itself, and keeps no record of who has which: the
// containers do. NVIDIA's driver is asked by a child process, AMD's through sysfs.
package accelerator

import (
	"cmp"
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/agent/internal/cdi"
	"github.com/gpuaas/gpuaas/pkg/notify"
	"github.com/gpuaas/gpuaas/protocol"
)

const (
	// DefaultInterval is the pause between two scans.
	DefaultInterval = 5 * time.Second
	// DefaultTimeout bounds one answer of NVIDIA's driver: without its persistence mode it starts every GPU first.
	DefaultTimeout = 20 * time.Second
	// maxPause bounds the pause between scans that fail; it doubles from the interval on.
	maxPause = time.Minute
)

// Config says where the inventory is taken and how often. Zero values take the defaults.
type Config struct {
	// Root is a directory with the machine's /sys, /proc and /opt; empty means /.
	Root string
	// NVML is the path of the program gpuaas-nvml.
	NVML string
	// DriverRoot is the directory in which NVIDIA's driver is installed; empty means /.
	DriverRoot string
	// Sharing says which GPUs are shared.
	Sharing Sharing
	// MPSDir has what MPS daemons and their clients share; containers can walk to it. Empty: no GPU is shared by MPS.
	MPSDir string
	// MPSIdle is how long an MPS daemon without containers lives.
	MPSIdle time.Duration
	// Interval is the pause between two scans.
	Interval time.Duration
	// Timeout bounds one answer of NVIDIA's driver.
	Timeout time.Duration
	// ResetProgram is the path of nvidia-smi; empty means the one below DriverRoot.
	ResetProgram string
	// TestProgram tests an accelerator before it returns from a reset or from quarantine: it gets vendor, id and PCI
	// address as arguments and ends with 0 where the accelerator works. Empty: an accelerator returns that had no fault
	// for TestFor.
	TestProgram string
	// LadderFile keeps the health of accelerators between starts of the agent, until a reboot; empty keeps nothing.
	LadderFile string
	// TestFor is how long a reset accelerator must be without a fault.
	TestFor time.Duration
	Log     *slog.Logger
}

// Inventory holds the accelerators that the last scans found. Make one with New, then call Run once.
type Inventory struct {
	cfg     Config
	sources []*source
	changes notify.Broadcast
	mps     *mps
	mu      sync.Mutex
	ladder  ladder
}

// source is one vendor's driver.
type source struct {
	vendor string
	scan   func(ctx context.Context) ([]*protocol.Accelerator, error)
	// edits are what a container needs to use what is granted to it. Its claims are filled in by the caller.
	edits func(ctx context.Context, granted []grant) (cdi.Edits, error)
	// reset resets the accelerator at a PCI address, by a program that inherits the files; nil where only the driver does
	// that.
	reset func(ctx context.Context, address string, inherit []*os.File) error
	// condition is reported while scans fail.
	condition string
	// scanned is closed after the first scan.
	scanned chan struct{}

	// found is the result of the last scan that succeeded, err that of the last one. Inventory.mu guards both.
	found []*protocol.Accelerator
	err   error
	// scannedAt is when the scan of found began.
	scannedAt time.Time
}

// New makes an inventory, empty until Run has scanned.
func New(cfg Config) *Inventory {
	cfg.Interval = cmp.Or(max(cfg.Interval, 0), DefaultInterval)
	cfg.Timeout = cmp.Or(max(cfg.Timeout, 0), DefaultTimeout)
	cfg.MPSIdle = cmp.Or(max(cfg.MPSIdle, 0), DefaultMPSIdle)
	cfg.TestFor = cmp.Or(max(cfg.TestFor, 0), DefaultTestFor)
	cfg.ResetProgram = cmp.Or(cfg.ResetProgram, filepath.Join("/", cfg.DriverRoot, "usr/bin/nvidia-smi"))
	cfg.Log = cmp.Or(cfg.Log, slog.New(slog.DiscardHandler))
	nvidia := &nvidia{
		machine: machine{cfg.Root}, program: cfg.NVML, root: filepath.Clean(cmp.Or(cfg.DriverRoot, "/")),
		timeout: cfg.Timeout, place: make(chan struct{}, 1), resetProgram: cfg.ResetProgram,
	}
	amd := &amd{machine: machine{cfg.Root}}
	i := &Inventory{cfg: cfg, ladder: loadLadder(cfg.LadderFile, time.Now()), sources: []*source{
		{
			vendor: protocol.VendorNVIDIA, scan: nvidia.scan, edits: nvidia.edits, reset: nvidia.reset,
			condition: protocol.ConditionNVIDIAUnresponsive, scanned: make(chan struct{}),
		},
		{vendor: protocol.VendorAMD, scan: amd.scan, edits: amd.edits, scanned: make(chan struct{})},
	}}
	i.mps = &mps{
		dir: cfg.MPSDir, program: cfg.NVML, root: nvidia.root, ended: i.changes.Send,
		release: func(ctx context.Context, gpu string) error {
			_, err := nvidia.ask(ctx, "mps-end", gpu)
			return err
		},
	}
	return i
}

// Run scans until ctx ends. The vendors do not wait for each other.
func (i *Inventory) Run(ctx context.Context) error {
	var running sync.WaitGroup
	for _, s := range i.sources {
		running.Go(func() { i.watch(ctx, s) })
	}
	running.Go(func() { i.repair(ctx) })
	running.Wait()
	return nil
}

func (i *Inventory) watch(ctx context.Context, s *source) {
	first := sync.OnceFunc(func() { close(s.scanned) })
	wait := i.cfg.Interval
	for {
		began := time.Now()
		found, err := s.scan(ctx)
		if ctx.Err() != nil {
			return
		}
		i.apply(ctx, s, found, err, began)
		first()
		if err == nil {
			wait = i.cfg.Interval
		} else {
			wait = min(2*wait, max(maxPause, i.cfg.Interval))
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
	}
}

// apply takes over the result of a scan. A driver that does not answer says nothing about its accelerators, so those
// that it named last stay.
func (i *Inventory) apply(ctx context.Context, s *source, found []*protocol.Accelerator, err error,
	began time.Time,
) {
	i.mu.Lock()
	defer i.mu.Unlock()
	before, failedBefore := s.found, s.err != nil
	if s.err = err; err == nil {
		for n := range found {
			found[n] = i.cfg.Sharing.share(found[n])
		}
		s.found, s.scannedAt = found, began
		i.findUsed()
		for _, a := range found {
			i.noteHeat(a, time.Now())
		}
	}
	same := slices.EqualFunc(before, s.found, func(a, b *protocol.Accelerator) bool { return proto.Equal(a, b) })
	if same && failedBefore == (err != nil) {
		return
	}
	if err != nil {
		i.cfg.Log.WarnContext(ctx, "a driver does not answer for its accelerators", slog.Any("error", err))
	} else {
		i.cfg.Log.InfoContext(ctx, "the accelerators of this machine have changed", slog.Int("before", len(before)),
			slog.Int("now", len(found)))
	}
	i.changes.Send()
}

// AwaitFirstScan waits until each driver has answered once, or had the time that it may take.
func (i *Inventory) AwaitFirstScan(ctx context.Context) {
	limit := time.NewTimer(i.cfg.Timeout + 3*killWait)
	defer limit.Stop()
	for _, s := range i.sources {
		select {
		case <-ctx.Done():
			return
		case <-limit.C:
			return
		case <-s.scanned:
		}
	}
}

// ScannedAt is when the last scan began whose result State knows: of two drivers with accelerators, the older one's. It
// is zero before the first.
func (i *Inventory) ScannedAt() (at time.Time) {
	i.mu.Lock()
	defer i.mu.Unlock()
	for _, s := range i.sources {
		if len(s.found) > 0 && (at.IsZero() || s.scannedAt.Before(at)) {
			at = s.scannedAt
		}
	}
	return at
}

// List returns the accelerators, sorted by their ids. Callers do not change them.
func (i *Inventory) List() []*protocol.Accelerator {
	i.mu.Lock()
	defer i.mu.Unlock()
	var all []*protocol.Accelerator
	for _, s := range i.sources {
		for _, a := range s.found {
			all = append(all, i.withLadder(a))
		}
	}
	slices.SortFunc(all, func(a, b *protocol.Accelerator) int { return cmp.Compare(a.GetId(), b.GetId()) })
	return all[:min(len(all), protocol.MaxAccelerators)]
}

// Conditions names the drivers that do not answer, and says whether a GPU cannot be shared as the owner wants.
func (i *Inventory) Conditions() []string {
	i.mu.Lock()
	defer i.mu.Unlock()
	var failing []string
	for _, s := range i.sources {
		if s.err != nil {
			failing = append(failing, s.condition)
		}
		if slices.ContainsFunc(s.found, i.cfg.Sharing.isRefused) && !slices.Contains(failing, protocol.ConditionNotShared) {
			failing = append(failing, protocol.ConditionNotShared)
		}
	}
	if i.mps.hasFailed() {
		failing = append(failing, protocol.ConditionNoMPS)
	}
	return failing
}

// Subscribe returns a channel that is signalled when accelerators or conditions have changed.
func (i *Inventory) Subscribe() <-chan struct{} { return i.changes.Subscribe() }

// machine reads files below a root.
type machine struct{ root string }

func (m machine) path(path string) string { return filepath.Join("/", m.root, path) }

// text is the content of a file without surrounding space, empty where it cannot be read. A board may name itself in
// any bytes, and no report with a text that is not UTF-8 can be encoded.
func (m machine) text(path string) string {
	raw, _ := os.ReadFile(m.path(path))
	return strings.ToValidUTF8(strings.TrimSpace(string(raw)), "?")
}

// numaNode is the NUMA node of a PCI device, nil where the kernel does not say.
func (m machine) numaNode(pciAddress string) *uint32 {
	n, err := strconv.ParseUint(m.text("sys/bus/pci/devices/"+pciAddress+"/numa_node"), 10, 32)
	if err != nil {
		return nil // -1 is none
	}
	return new(uint32(n))
}
