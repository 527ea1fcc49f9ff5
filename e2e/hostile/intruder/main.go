// Command intruder is the app of the hostile tests: on request it tries what a container must not be able to do, and
// says what came of it. It needs nothing but its own binary.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Outcome is the answer to a request.
type Outcome struct {
	// Done lists what succeeded; empty is what the tests want of most attempts.
	Done []string `json:"done"`
	// Refused says why the rest did not, by attempt.
	Refused map[string]string `json:"refused"`
	// Count is how often the attempt succeeded before it was refused, for what is bounded.
	Count int `json:"count"`
}

func main() {
	if len(os.Args) > 1 && os.Args[1] == "sleep" {
		time.Sleep(time.Hour)
		return
	}
	if len(os.Args) > 1 && os.Args[1] == "whoami" {
		fmt.Print(os.Geteuid())
		return
	}
	spareThreads(4)
	server := &http.Server{Addr: ":8080", ReadHeaderTimeout: 5 * time.Second, Handler: http.HandlerFunc(serve)}
	if err := server.ListenAndServe(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// spareThreads makes threads that wait for work. Where all process ids are taken, the Go runtime ends a program that
// needs one more thread, as happens on a busy machine.
func spareThreads(n int) {
	var held sync.WaitGroup
	held.Add(n)
	for range n {
		go func() {
			runtime.LockOSThread()
			held.Done()
			held.Wait()
			runtime.UnlockOSThread()
		}()
	}
	held.Wait()
}

func serve(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path == "/" {
		_, _ = fmt.Fprintln(w, "here")
		return
	}
	var out Outcome
	switch strings.TrimPrefix(r.URL.Path, "/") {
	case "try":
		out = try(attempts())
	case "dial":
		out = dial(r.URL.Query())
	case "see":
		out = see()
	case "volume":
		out = try(misuses(r.FormValue("of")))
	case "fork":
		out = bounded(fork)
	case "watch":
		out = bounded(watch)
	case "fill":
		out = fill(r.FormValue("with"))
	default:
		http.NotFound(w, r)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(out)
}

func try(all map[string]func() error) Outcome {
	out := Outcome{Refused: map[string]string{}}
	for name, attempt := range all {
		if err := attempt(); err != nil {
			out.Refused[name] = err.Error()
		} else {
			out.Done = append(out.Done, name)
		}
	}
	return out
}

// attempts are what no container may do, whatever its user.
func attempts() map[string]func() error {
	all := map[string]func() error{
		"a packet socket, to forge ARP": socket(unix.AF_PACKET, unix.SOCK_RAW),
		"a raw socket":                  socket(unix.AF_INET, unix.SOCK_RAW),
		"a VM socket":                   socket(unix.AF_VSOCK, unix.SOCK_STREAM),
		"another address of its link":   setAddress,
		"a mount":                       func() error { return unix.Mount("tmpfs", "/mnt", "tmpfs", 0, "") },
		"a bind mount":                  func() error { return unix.Mount("/proc", "/mnt", "", unix.MS_BIND, "") },
		"a user namespace":              func() error { return unix.Unshare(unix.CLONE_NEWUSER) },
		"a network namespace":           func() error { return unix.Unshare(unix.CLONE_NEWNET) },
		"another root directory":        func() error { return unix.PivotRoot("/tmp", "/tmp") },
		"the clock":                     func() error { return unix.Settimeofday(&unix.Timeval{Sec: 1}) },
		"the host's name":               func() error { return unix.Sethostname([]byte("mine")) },
		"a restart of the machine":      func() error { return unix.Reboot(unix.LINUX_REBOOT_CMD_CAD_OFF) },
		"a better score for the kernel": func() error { return write("/proc/self/oom_score_adj", "-1000") },
		"a real-time priority":          func() error { return unix.Setpriority(unix.PRIO_PROCESS, 0, -20) },
		"more open files than allowed": func() error {
			return unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 1 << 30, Max: 1 << 30})
		},
	}
	for name, number := range map[string]uintptr{
		"bpf": unix.SYS_BPF, "perf_event_open": unix.SYS_PERF_EVENT_OPEN, "keyctl": unix.SYS_KEYCTL,
		"add_key": unix.SYS_ADD_KEY, "init_module": unix.SYS_INIT_MODULE, "kexec_load": unix.SYS_KEXEC_LOAD,
		"swapon": unix.SYS_SWAPON, "open_by_handle_at": unix.SYS_OPEN_BY_HANDLE_AT, "userfaultfd": unix.SYS_USERFAULTFD,
		"io_uring_setup": unix.SYS_IO_URING_SETUP, "acct": unix.SYS_ACCT, "syslog": unix.SYS_SYSLOG,
	} {
		all["the call "+name] = func() error {
			// With arguments of zeros the kernel would find another fault where the call itself is allowed.
			_, _, errno := unix.Syscall6(number, 0, 0, 0, 0, 0, 0)
			if errno == unix.EPERM || errno == unix.ENOSYS {
				return errno
			}
			return nil
		}
	}
	for _, path := range []string{
		"/proc/kcore", "/proc/kmsg", "/dev/mem", "/dev/kmsg", "/dev/port", "/proc/1/root/proc/kcore",
		"/sys/kernel/debug/x86", "/sys/firmware/efi/efivars", "/run/containerd/containerd.sock",
	} {
		all["reading "+path] = func() error { return open(path, os.O_RDONLY) }
	}
	for _, path := range []string{
		"/proc/sys/kernel/core_pattern", "/proc/sys/net/ipv4/ip_forward", "/proc/sysrq-trigger", "/proc/sys/vm/drop_caches",
		"/sys/kernel/uevent_helper", "/sys/power/state", "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/pids.max",
		"/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/pids/pids.max", "/sys/fs/cgroup/devices/devices.allow",
		"/sys/fs/cgroup/cgroup.procs",
	} {
		all["writing "+path] = func() error { return open(path, os.O_WRONLY) }
	}
	for name, device := range map[string]struct {
		mode         uint32
		major, minor uint32
	}{
		"the first disk": {unix.S_IFBLK, 8, 0}, "the first virtual disk": {unix.S_IFBLK, 253, 0},
		"physical memory": {unix.S_IFCHR, 1, 1}, "the kernel's log": {unix.S_IFCHR, 1, 11}, "fuse": {unix.S_IFCHR, 10, 229},
		"kvm": {unix.S_IFCHR, 10, 232}, "a GPU": {unix.S_IFCHR, 195, 0}, "a render node": {unix.S_IFCHR, 226, 128},
	} {
		all["a device node of "+name] = func() error {
			path := filepath.Join("/tmp", strings.ReplaceAll(name, " ", "-"))
			defer func() { _ = os.Remove(path) }()
			return errors.Join(unix.Mknod(path, device.mode|0o600, int(unix.Mkdev(device.major, device.minor))),
				open(path, os.O_RDONLY))
		}
	}
	return all
}

// misuses are what must not come of what a volume can hold: links out of it, device nodes, set-user-ID programs. of is
// a file of the machine.
func misuses(of string) map[string]func() error {
	const dir = "/data/"
	all := map[string]func() error{
		"a set-user-ID program that may more": func() error {
			program := dir + "program"
			binary, err := os.ReadFile("/app")
			err = errors.Join(err, os.WriteFile(program, binary, 0o600), os.Chown(program, 1, 1),
				os.Chmod(program, os.ModeSetuid|0o755))
			if err != nil {
				return err
			}
			who, err := exec.Command(program, "whoami").Output()
			if err == nil && string(who) == "0" {
				err = errors.New("it runs as its caller")
			}
			return err
		},
		"a mount below it": func() error { return unix.Mount("tmpfs", dir, "tmpfs", 0, "") },
		"its file system with devices and set-user-ID programs": func() error {
			return unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_BIND, "")
		},
		"its file system's own files": func() error { return open(dir+"../lost+found", os.O_RDONLY) },
		"a freeze of it": func() error {
			const fiFreeze = 0xC0045877
			f, err := os.Open(dir)
			if err != nil {
				return err
			}
			defer func() { _ = f.Close() }()
			return unix.IoctlSetInt(int(f.Fd()), fiFreeze, 0)
		},
	}
	for name, device := range map[string]struct{ mode, major, minor uint32 }{
		"a loop device": {unix.S_IFBLK, 7, 0}, "physical memory": {unix.S_IFCHR, 1, 1}, "a disk": {unix.S_IFBLK, 253, 0},
	} {
		all["a device node of "+name] = func() error {
			path := dir + strings.ReplaceAll(name, " ", "-")
			return errors.Join(unix.Mknod(path, device.mode|0o600, int(unix.Mkdev(device.major, device.minor))),
				open(path, os.O_RDONLY))
		}
	}
	for i, target := range []string{
		of, "../../../../../../.." + of, "/proc/1/root" + of, "/proc/self/root/../.." + of, "/proc/1/cwd/.." + of,
	} {
		all["a link to "+target] = func() error {
			link := fmt.Sprint(dir, "link", i)
			_ = os.Remove(link)
			return errors.Join(os.Symlink(target, link), open(link, os.O_RDONLY))
		}
	}
	return all
}

func socket(domain, kind int) func() error {
	return func() error {
		protocol := 0
		if kind == unix.SOCK_RAW && domain == unix.AF_INET {
			protocol = unix.IPPROTO_ICMP
		}
		fd, err := unix.Socket(domain, kind, protocol)
		if err == nil {
			_ = unix.Close(fd)
		}
		return err
	}
}

// setAddress takes the address of the bridge for the container's own link.
func setAddress() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	var request struct {
		name [unix.IFNAMSIZ]byte
		addr unix.RawSockaddrInet4
		_    [8]byte
	}
	copy(request.name[:], "eth0")
	request.addr = unix.RawSockaddrInet4{Family: unix.AF_INET, Addr: [4]byte{10, 0, 0, 1}}
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCSIFADDR, uintptr(unsafe.Pointer(&request)))
	if errno != 0 {
		return errno
	}
	return nil
}

func open(path string, flag int) error {
	f, err := os.OpenFile(path, flag, 0)
	if err == nil {
		_ = f.Close()
	}
	return err
}

func write(path, text string) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	return errors.Join(err, f.Close())
}

// dialLimit is far above what an answer on one machine takes.
const dialLimit = 3 * time.Second

// dial connects to each of the targets.
func dial(query url.Values) Outcome {
	all := map[string]func() error{}
	for _, target := range query["to"] {
		all[target] = func() error {
			c, err := net.DialTimeout("tcp", target, dialLimit)
			if err == nil {
				_ = c.Close()
			}
			return err
		}
	}
	return try(all)
}

// see lists the processes and the named sockets that are not the container's own.
func see() Outcome {
	var out Outcome
	names, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, name := range names {
		if cmd, err := os.ReadFile(name); err == nil && !strings.HasPrefix(string(cmd), "/app") {
			out.Done = append(out.Done, "process "+string(cmd))
		}
	}
	sockets, _ := os.ReadFile("/proc/net/unix")
	for line := range strings.Lines(string(sockets)) {
		if strings.ContainsAny(line, "/@") {
			out.Done = append(out.Done, "socket "+line)
		}
	}
	return out
}

// limit bounds how often a bounded attempt is made.
const limit = 1 << 16

// bounded repeats an attempt until it is refused.
func bounded(attempt func() (undo func(), err error)) Outcome {
	out := Outcome{Refused: map[string]string{}}
	for out.Count < limit {
		undo, err := attempt()
		if err != nil {
			out.Refused["more"] = err.Error()
			return out
		}
		defer undo()
		out.Count++
	}
	return out
}

func fork() (func(), error) {
	c := exec.Command("/app", "sleep")
	if err := c.Start(); err != nil {
		return nil, err
	}
	return func() {
		_ = c.Process.Kill()
		_ = c.Wait()
	}, nil
}

// watch takes an inotify instance.
func watch() (func(), error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC)
	return func() { _ = unix.Close(fd) }, err
}

// fillLimit bounds what fill takes where nothing stops it.
const fillLimit = 4 << 30

// fill takes memory, disk, files or log without end.
func fill(with string) Outcome {
	out := Outcome{Refused: map[string]string{}}
	block := make([]byte, 1<<20)
	for i := range block {
		block[i] = 'x'
	}
	var held [][]byte
	var file *os.File
	var err error
	for taken := 0; err == nil && taken < fillLimit; taken += len(block) {
		switch with {
		case "memory":
			held = append(held, append([]byte(nil), block...))
		case "shared memory":
			file, err = appendTo(file, "/dev/shm/full", block)
		case "disk":
			file, err = appendTo(file, "/full", block)
		case "volume":
			file, err = appendTo(file, "/data/full", block)
		case "volume's files":
			for range 1 << 8 {
				out.Count++
				err = errors.Join(err, os.WriteFile(fmt.Sprint("/data/", out.Count), nil, 0o600))
			}
		case "log":
			_, err = os.Stdout.Write(block)
		case "files":
			for range 1 << 8 {
				out.Count++
				err = errors.Join(err, os.WriteFile(fmt.Sprint("/file", out.Count), nil, 0o600))
			}
		default:
			err = fmt.Errorf("there is nothing called %q", with)
		}
	}
	out.Count = max(out.Count, len(held))
	if err != nil {
		out.Refused[with] = err.Error()
	} else {
		out.Done = append(out.Done, with)
	}
	return out
}

func appendTo(file *os.File, path string, block []byte) (*os.File, error) {
	if file == nil {
		var err error
		if file, err = os.Create(path); err != nil {
			return nil, err
		}
	}
	_, err := file.Write(block)
	return file, err
}
