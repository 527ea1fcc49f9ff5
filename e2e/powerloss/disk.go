// Package powerloss is a disk whose power a test can cut: a block device of the kernel with a volatile write cache, and
// ext4 on it. What nobody flushed is lost at the cut, with a random part of it written before, as on a real disk. It
// knows nothing of the programs that use the disk.
package powerloss

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Disk is a disk with a file system. Its methods may not be called at the same time.
type Disk struct {
	// Point is where the file system is mounted while the power is on.
	Point string

	dir    string
	file   *os.File
	bytes  int64
	device *device
	leash  leash
	cuts   int
}

// New makes a disk of that many MiB, which keeps its files in dir, and mounts it at point. Close it.
func New(dir, point string, mib int) (_ *Disk, err error) {
	if err := errors.Join(os.MkdirAll(dir, 0o700), os.MkdirAll(point, 0o755)); err != nil {
		return nil, err
	}
	d := &Disk{Point: point, dir: dir, bytes: int64(mib) << 20}
	if d.leash, err = newLeash(dir, point); err != nil {
		return nil, err
	}
	if d.file, err = os.OpenFile(d.image(), os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600); err != nil {
		return nil, err
	}
	if err := d.file.Truncate(d.bytes); err != nil {
		return nil, err
	}
	out, err := exec.Command("mkfs.ext4", "-q", "-E", "lazy_itable_init=0,nodiscard", d.image()).CombinedOutput()
	if err != nil {
		return nil, fmt.Errorf("mkfs.ext4: %w: %s", err, out)
	}
	if err := d.PowerOn(); err != nil {
		return nil, err
	}
	return d, nil
}

func (d *Disk) image() string { return filepath.Join(d.dir, "image") }

// PowerOn attaches the disk and mounts its file system, which replays its journal.
func (d *Disk) PowerOn() (err error) {
	d.device, err = attach(newCache(d.file, d.bytes), filepath.Join(d.dir, fmt.Sprintf("device-%d", d.cuts)))
	if err != nil {
		return err
	}
	if err := mount(d.device.loop, d.Point); err != nil {
		return errors.Join(err, d.device.detach())
	}
	return nil
}

func mount(loop *os.File, point string) error {
	if err := unix.Mount(loop.Name(), point, "ext4", 0, "errors=remount-ro"); err != nil {
		return fmt.Errorf("mount %s at %s: %w", loop.Name(), point, err)
	}
	return nil
}

// Cut fails the power: what was not flushed is lost, and no request is answered from now on. The function kills
// everything that works on the disk, without waiting for its end: a process that waits for the disk dies when Cut
// returns. Afterwards the file system is unmounted, even while processes use it. Cut returns how many pages were lost.
func (d *Disk) Cut(random *rand.Rand, kill func() error) (lost int, err error) {
	lost, err = d.device.cache.cut(random)
	err = errors.Join(err, kill())
	d.device.cache.release()
	d.cuts++
	return lost, errors.Join(err, d.powerOff())
}

func (d *Disk) powerOff() error {
	return errors.Join(unix.Unmount(d.Point, unix.MNT_DETACH), d.device.detach())
}

// Examine mounts a copy of what is durable while the power is off, and calls examine. The file system then lies on a
// plain file: a program that maps files of the disk into its memory must not be the one that serves the disk, but
// examine may do so.
func (d *Disk) Examine(examine func()) (err error) {
	examined := filepath.Join(d.dir, "examined")
	if out, err := exec.Command("cp", "--sparse=always", d.image(), examined).CombinedOutput(); err != nil {
		return fmt.Errorf("copy the disk: %w: %s", err, out)
	}
	loop, err := attachLoop(examined)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, loop.Close(), os.Remove(examined)) }()
	if err := mount(loop, d.Point); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, unix.Unmount(d.Point, unix.MNT_DETACH)) }()
	examine()
	return nil
}

// Sync makes everything durable, as a machine that was installed long ago has it.
func (d *Disk) Sync() error {
	f, err := os.Open(d.Point)
	if err != nil {
		return err
	}
	return errors.Join(unix.Syncfs(int(f.Fd())), f.Close())
}

// Close unmounts the disk and removes its files. The power may be on or off.
func (d *Disk) Close() error {
	var errs []error
	if d.device.loop != nil {
		errs = append(errs, d.powerOff())
	}
	return errors.Join(append(errs, d.file.Close(), os.RemoveAll(d.dir), d.leash.release())...)
}
