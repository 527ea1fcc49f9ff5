package accelerator

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/pkg/daemon"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// maxUnplaced bounds the messages that wait for a driver; the oldest are dropped first.
const maxUnplaced = 256

// errNoReset: the machine has no program that resets the accelerator.
var errNoReset = errors.New("the machine has no program that resets it")

// ladder is where each accelerator stands. Inventory.mu guards it.
type ladder struct {
	// rungs are by the id of the accelerator.
	Rungs map[string]rung `json:"rungs"`
	// Boot is the id of the boot that this is of.
	Boot string `json:"boot,omitempty"`
	// Read is the last record of the kernel's log that counts already, but for the messages that are unplaced.
	Read uint64 `json:"read"`
	// Unplaced are messages about accelerators that no driver has named yet, oldest first.
	Unplaced []signal `json:"unplaced,omitempty"`
	// ids are by PCI address, also of accelerators that are gone.
	ids map[string]string
	// given are the ids that containers have, as of usedAt; used are the accelerators that they are of.
	given  []string
	used   map[string]bool
	usedAt time.Time
	// hotAt is when accelerators were too hot last.
	hotAt map[string]time.Time
	// underWay are those that are being reset or tested.
	underWay map[string]bool
}

// SetUsed takes which accelerators and partitions containers have now: only one that none has is reset.
func (i *Inventory) SetUsed(ids []string) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.ladder.usedAt, i.ladder.given = time.Now(), slices.Clone(ids)
	i.findUsed()
}

// findUsed finds the accelerators of what containers have, again after each scan: a driver may name a partition only
// after the first pass of the agent. The id of a slice names its GPU, also where that is shared otherwise by now.
func (i *Inventory) findUsed() {
	i.ladder.used = map[string]bool{}
	for _, id := range i.ladder.given {
		_, g := i.find(id)
		gpu, _, _ := protocol.SliceOf(id)
		i.ladder.used[cmp.Or(g.accelerator.GetId(), gpu, id)] = true
	}
}

// repair moves the accelerators on the ladder until ctx ends.
func (i *Inventory) repair(ctx context.Context) {
	log := &kernelLog{path: machine{i.cfg.Root}.path("dev/kmsg")}
	defer log.close()
	var underWay sync.WaitGroup
	defer underWay.Wait()
	i.AwaitFirstScan(ctx)
	for ctx.Err() == nil {
		for id, due := range i.advance(ctx, log, time.Now()) {
			underWay.Go(func() {
				defer i.done(id)
				if due == dutyReset {
					i.reset(ctx, id)
				} else {
					i.test(ctx, id)
				}
			})
		}
		i.mu.Lock()
		used, usedAt := maps.Clone(i.ladder.used), i.ladder.usedAt
		i.mu.Unlock()
		underWay.Go(func() { // one that does not end delays nothing else
			if err := i.mps.stopIdle(ctx, used, usedAt, i.cfg.MPSIdle); err != nil {
				i.cfg.Log.WarnContext(ctx, "an MPS daemon cannot be ended", slog.Any("error", err))
			}
		})
		select {
		case <-ctx.Done():
		case <-time.After(i.cfg.Interval):
		}
	}
}

// advance applies what the drivers have written, and the time that has passed. It returns what to do by accelerator.
func (i *Inventory) advance(ctx context.Context, log *kernelLog, now time.Time) map[string]duty {
	i.mu.Lock()
	defer i.mu.Unlock()
	for _, s := range i.sources {
		for _, a := range s.found {
			i.ladder.ids[a.GetPciAddress()] = a.GetId()
			if a.GetHealth() == protocol.HealthNeedsReset && i.ladder.Rungs[a.GetId()].Health == "" {
				i.move(ctx, a.GetId(), i.ladder.Rungs[a.GetId()].after(signal{Verdict: needsReset, Cause: a.GetHealthReason()},
					now))
			}
		}
	}
	signals, last := log.read(i.ladder.Read)
	unplaced := i.place(ctx, slices.Concat(i.ladder.Unplaced, signals), now)
	if i.ladder.Read != last || len(i.ladder.Unplaced) != len(unplaced) {
		i.ladder.Read, i.ladder.Unplaced = last, unplaced
		i.save(ctx)
	}
	duties := map[string]duty{}
	for id, r := range i.ladder.Rungs {
		s, g := i.find(id)
		health := g.accelerator.GetHealth()
		answers := health == protocol.HealthOK || health == protocol.HealthDegraded
		free := i.ladder.usedAt.After(r.Since) && !i.ladder.used[id]
		if r.Health == protocol.HealthTesting && !i.mayJudge(id, s, r) {
			continue
		}
		next, due := r.step(answers, free, i.cfg.TestFor, now)
		i.move(ctx, id, next)
		if due != noDuty && !i.ladder.underWay[id] {
			duties[id], i.ladder.underWay[id] = due, true
		}
	}
	return duties
}

// place applies messages of the drivers. It returns those about accelerators that a driver may still name which has not
// answered since the agent's start.
func (i *Inventory) place(ctx context.Context, signals []signal, now time.Time) (unplaced []signal) {
	awaited := slices.ContainsFunc(i.sources, func(s *source) bool { return s.scannedAt.IsZero() })
	for _, s := range signals {
		if id := i.ladder.ids[s.Address]; id != "" {
			i.move(ctx, id, i.ladder.Rungs[id].after(s, now))
		} else if awaited {
			unplaced = append(unplaced, s)
		}
	}
	return unplaced[max(len(unplaced)-maxUnplaced, 0):]
}

// mayJudge reports whether the test of a reset accelerator may end: its driver, or every driver where none names it,
// was asked after the reset, and no container has it, which the test program would disturb.
func (i *Inventory) mayJudge(id string, s *source, r rung) bool {
	for _, asked := range i.sources {
		if (s == nil || s == asked) && !asked.scannedAt.After(r.Since) {
			return false
		}
	}
	return !i.ladder.usedAt.IsZero() && !i.ladder.used[id]
}

// coolFor is how long an accelerator must not have been too hot until it is ok again: one that goes up and down by a
// degree would else change its health at each scan.
const coolFor = 2 * time.Minute

func (i *Inventory) noteHeat(a *protocol.Accelerator, now time.Time) {
	hotAt, wasHot := i.ladder.hotAt[a.GetId()]
	switch {
	case a.GetHealthReason() == protocol.TooHot:
		i.ladder.hotAt[a.GetId()] = now
	case wasHot && now.Sub(hotAt) >= coolFor:
		delete(i.ladder.hotAt, a.GetId())
		i.changes.Send()
	}
}

func (i *Inventory) done(id string) {
	i.mu.Lock()
	defer i.mu.Unlock()
	delete(i.ladder.underWay, id)
}

// Release takes an accelerator that an operator has repaired or reset out of quarantine: it is tested, and then given
// to containers again. A container that still has it would be disturbed by the test, so it is refused then.
func (i *Inventory) Release(ctx context.Context, id string) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	r, known := i.ladder.Rungs[id]
	_, g := i.find(id)
	switch {
	case !known && g.accelerator == nil:
		return fault.New(fault.NotFound, codeNoAccelerator, "The machine has no accelerator "+id+".", nil)
	case r.Health != protocol.HealthQuarantined && r.Health != protocol.HealthNeedsReset:
		return fault.New(fault.Conflict, codeNotOutOfUse, "The accelerator "+id+" is neither quarantined nor does it wait "+
			"for a reset.", nil)
	case i.ladder.used[id]:
		return fault.New(fault.Conflict, agent.CodeAcceleratorInUse, "A container still has the accelerator "+id+".", nil)
	}
	i.move(ctx, id, r.released(time.Now()))
	return nil
}

// test runs the operator's test program, if there is one, on an accelerator that no container has.
func (i *Inventory) test(ctx context.Context, id string) {
	i.mu.Lock()
	_, g := i.find(id)
	i.mu.Unlock()
	if g.accelerator == nil {
		return // it is missing
	}
	err := i.runTest(ctx, g.accelerator)
	if ctx.Err() != nil {
		return
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	i.move(ctx, id, i.ladder.Rungs[id].tested(err, time.Now()))
}

// testTimeout bounds one run of the test program.
const testTimeout = 15 * time.Minute

// runTest gives the program the accelerator's vendor, id and PCI address. Its last line says why it failed.
func (i *Inventory) runTest(ctx context.Context, a *protocol.Accelerator) error {
	if i.cfg.TestProgram == "" {
		return nil
	}
	inherit, unlock, err := i.lock(ctx, a.GetId())
	if err != nil {
		return err
	}
	defer unlock()
	ctx, cancel := context.WithTimeout(ctx, testTimeout)
	defer cancel()
	var out lastLine
	cmd := exec.CommandContext(ctx, i.cfg.TestProgram, a.GetVendor(), a.GetId(), a.GetPciAddress())
	cmd.Stdout, cmd.Stderr, cmd.WaitDelay, cmd.ExtraFiles = &out, &out, killWait, inherit
	if err := cmd.Run(); ctx.Err() != nil {
		return fmt.Errorf("its test has not ended within %s", testTimeout)
	} else if err != nil {
		return fmt.Errorf("its test failed: %w: %s", err, out.text())
	}
	return nil
}

// lock waits until no program of an earlier agent tests or resets the accelerator: a kill of the agent does not end it.
// The program that this agent starts next inherits the locked file. unlock unlocks it for all that have it (flock(2)).
func (i *Inventory) lock(ctx context.Context, id string) (inherit []*os.File, unlock func(), err error) {
	if i.cfg.LadderFile == "" {
		return nil, func() {}, nil // without state that outlives the agent
	}
	if !isName(id) {
		return nil, nil, fmt.Errorf("%q is no id of an accelerator", id)
	}
	file, err := os.OpenFile(i.cfg.LadderFile+"."+id+".lock", os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, testTimeout)
	defer cancel()
	if err := daemon.AwaitLock(ctx, file); err != nil {
		return nil, nil, errors.Join(fmt.Errorf("a program of an earlier agent still uses it: %w", err), file.Close())
	}
	return []*os.File{file}, func() {
		_ = errors.Join(unix.Flock(int(file.Fd()), unix.LOCK_UN), file.Close())
	}, nil
}

// reset resets an accelerator that no container has.
func (i *Inventory) reset(ctx context.Context, id string) {
	i.mu.Lock()
	s, g := i.find(id)
	i.mu.Unlock()
	if s == nil {
		return // it is missing
	}
	err := errNoReset
	if s.reset != nil {
		var inherit []*os.File
		var unlock func()
		if inherit, unlock, err = i.lock(ctx, id); err == nil {
			err = s.reset(ctx, g.accelerator.GetPciAddress(), inherit)
			unlock()
		}
	}
	if ctx.Err() != nil {
		return
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	r := i.ladder.Rungs[id]
	if errors.Is(err, errNoReset) {
		i.move(ctx, id, r.withoutReset())
		return
	}
	if err != nil {
		i.cfg.Log.WarnContext(ctx, "an accelerator could not be reset", slog.String("accelerator", id),
			slog.Any("error", err))
	}
	i.move(ctx, id, r.resetBy(err, time.Now()))
}

// move puts an accelerator on a rung.
func (i *Inventory) move(ctx context.Context, id string, to rung) {
	from := i.ladder.Rungs[id]
	if from == to {
		return
	}
	i.ladder.Rungs[id] = to
	i.save(ctx)
	i.cfg.Log.WarnContext(ctx, "the health of an accelerator has changed", slog.String("accelerator", id),
		slog.String("from", from.Health), slog.String("to", to.Health), slog.String("reason", to.Reason))
	i.changes.Send()
}

// save keeps the ladder for the next start of the agent.
func (i *Inventory) save(ctx context.Context) {
	if i.cfg.LadderFile == "" {
		return
	}
	raw, err := json.Marshal(i.ladder)
	if err == nil {
		err = os.WriteFile(i.cfg.LadderFile+".new", raw, 0o600)
	}
	if err == nil {
		err = os.Rename(i.cfg.LadderFile+".new", i.cfg.LadderFile)
	}
	if err != nil {
		i.cfg.Log.WarnContext(ctx, "the health of accelerators cannot be kept", slog.Any("error", err))
	}
}

// loadLadder forgets the ladder of an earlier boot, which the file may outlive: with the kernel's log the numbers of
// its records begin anew, and a reboot resets every accelerator.
func loadLadder(file string, now time.Time) ladder {
	var l ladder
	if raw, err := os.ReadFile(file); err != nil || json.Unmarshal(raw, &l) != nil {
		l = ladder{} // none yet, or not this agent's
	}
	if boot, err := daemon.BootID(); err == nil {
		if l.Boot != "" && l.Boot != boot {
			l = ladder{}
		}
		l.Boot = boot
	}
	if l.Rungs == nil {
		l.Rungs = map[string]rung{}
	}
	for id, r := range l.Rungs {
		l.Rungs[id] = r.notAhead(now)
	}
	l.ids, l.underWay, l.hotAt = map[string]string{}, map[string]bool{}, map[string]time.Time{}
	return l
}

// withLadder is an accelerator as the ladder sees it.
func (i *Inventory) withLadder(a *protocol.Accelerator) *protocol.Accelerator {
	r := i.ladder.Rungs[a.GetId()]
	if _, hot := i.ladder.hotAt[a.GetId()]; hot && r.Health == "" && a.GetHealth() == protocol.HealthOK {
		out := proto.CloneOf(a)
		out.Health, out.HealthReason = protocol.HealthDegraded, protocol.TooHot
		return out
	}
	if r.Health == "" && (r.Reason == "" || a.GetHealth() != protocol.HealthOK) {
		return a
	}
	out := proto.CloneOf(a)
	out.HealthReason = r.Reason
	if r.Health != "" {
		out.Health = r.Health
	}
	return out
}
