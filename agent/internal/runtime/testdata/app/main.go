// Command app is what the runtime's tests run in containers.
package main

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"math"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	goruntime "runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

func main() {
	switch os.Args[1] {
	case "wait": // until SIGTERM, then exit with the given code
		term := make(chan os.Signal, 1)
		signal.Notify(term, syscall.SIGTERM)
		fmt.Println("ready")
		<-term
		os.Exit(number(2))
	case "stubborn":
		signal.Ignore(syscall.SIGTERM)
		fmt.Println("ready")
		forever()
	case "exit":
		os.Exit(number(2))
	case "exit-when": // a file appears
		await(os.Args[2])
		os.Exit(number(3))
	case "list": // files as the container sees them
		list(os.Args[2:])
	case "alter": // files of the image, then list them
		alter()
		list(os.Args[2:])
	case "touch":
		check(os.WriteFile(os.Args[2], nil, 0o600))
	case "complain": // and end at once
		fmt.Fprintln(os.Stderr, "a last word")
	case "lines":
		lines(number(2), os.Args[3], os.Args[4])
	case "lines-exit":
		lines(number(2), "", "")
	case "eat":
		eat(number(2))
	case "fill", "fill-removed", "fill-mapped", "fill-apart", "fill-outside":
		fill(os.Args[1], os.Args[2], number(3))
	case "deep":
		deepen(number(2))
	case "shout":
		for line := make([]byte, 1<<20); ; {
			_, _ = os.Stdout.Write(line)
		}
	case "spin":
		fmt.Println("ready")
		for { //nolint:staticcheck // it is to use a whole core
		}
	case "serve":
		check(http.ListenAndServe(os.Args[2], http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			fmt.Fprintln(w, "hello")
		})))
	case "hang":
		forever()
	case "inspect":
		inspect()
	case "devices":
		devices(os.Args[2:])
	}
}

// lines prints numbered lines. With file names it makes the file made before the last line, waits for the file awaited,
// and stays.
func lines(count int, made, awaited string) {
	for i := range count {
		if i == count-1 && made != "" {
			check(os.WriteFile(made, nil, 0o600))
			await(awaited)
		}
		fmt.Println("line", i)
	}
	if made != "" {
		fmt.Println("done")
		forever()
	}
}

// eat uses memory.
func eat(megabytes int) {
	var all [][]byte
	for range megabytes {
		b := make([]byte, 1<<20)
		for i := range b {
			b[i] = 1
		}
		all = append(all, b)
	}
	fmt.Println(len(all))
}

// fill writes a file, and stays. It holds the file open, in the other ways after it has removed it: by a mapping alone,
// by a thread that has files of its own, or after a change of its root to another file system.
func fill(way, path string, megabytes int) {
	if way == "fill-apart" {
		goruntime.LockOSThread()
		if unix.Gettid() == os.Getpid() { // the first thread's files are those of the process
			go fill(way, path, megabytes)
			forever()
		}
		check(unix.CloseRange(math.MaxInt32, math.MaxInt32, unix.CLOSE_RANGE_UNSHARE))
	}
	file, err := os.Create(path)
	check(err)
	if way != "fill" {
		check(os.Remove(path))
	}
	for range megabytes {
		_, err := file.Write(make([]byte, 1<<20))
		check(err)
	}
	check(file.Sync())
	switch way {
	case "fill-mapped":
		_, err := unix.Mmap(int(file.Fd()), 0, megabytes<<20, unix.PROT_READ, unix.MAP_SHARED)
		check(err)
		check(file.Close())
	case "fill-outside":
		check(unix.Chroot("/dev/shm"))
	}
	fmt.Println("filled")
	forever()
}

// deepen makes directories in one another, and stays.
func deepen(count int) {
	for range count {
		check(os.Mkdir("d", 0o700))
		check(os.Chdir("d"))
	}
	fmt.Println("made")
	forever()
}

func forever() {
	for {
		time.Sleep(time.Hour)
	}
}

// await returns when the file is there.
func await(path string) {
	for {
		if _, err := os.Stat(path); err == nil {
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func number(i int) int {
	if len(os.Args) <= i {
		return 0
	}
	n, err := strconv.Atoi(os.Args[i])
	check(err)
	return n
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(99)
	}
}

func read(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return "error: " + err.Error()
	}
	return strings.TrimSpace(string(b))
}

func names(dir string) []string {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return []string{"error: " + err.Error()}
	}
	all := []string{}
	for _, e := range entries {
		all = append(all, e.Name())
	}
	return all
}

func try(err error) string {
	if err != nil {
		return err.Error()
	}
	return "ok"
}

// inspect prints what a container sees, as one line of JSON.
func inspect() {
	host, _ := os.Hostname()
	var tmp syscall.Statfs_t
	_ = syscall.Statfs("/scratch", &tmp)
	_, listenErr := net.Listen("tcp", ":80")
	groups, _ := os.Getgroups()
	out := map[string]any{
		"uid": os.Getuid(), "gid": os.Getgid(), "groups": groups, "pid": os.Getpid(), "hostname": host, "env": os.Environ(),
		"args": os.Args, "cwd": try(nil),
		"status": read("/proc/self/status"), "uid_map": read("/proc/self/uid_map"), "oom": read("/proc/self/oom_score_adj"),
		"links": names("/sys/class/net"), "devices": names("/dev"), "cgroups": names("/sys/fs/cgroup"),
		"resolv": read("/etc/resolv.conf"), "hosts": read("/etc/hosts"),
		"write_root": try(os.WriteFile("/new", nil, 0o600)), "write_scratch": try(os.WriteFile("/scratch/new", nil, 0o600)),
		"write_sys":  try(os.WriteFile("/sys/class/net/lo/mtu", []byte("1000"), 0o600)),
		"write_proc": try(os.WriteFile("/proc/sys/kernel/hostname", []byte("x"), 0o600)),
		"mount":      try(syscall.Mount("none", "/tmp", "tmpfs", 0, "")),
		"mknod":      try(syscall.Mknod("/scratch/dev", syscall.S_IFBLK|0o600, 8<<8)),
		"unshare":    try(syscall.Unshare(syscall.CLONE_NEWUSER)), "scratch_bytes": int64(tmp.Blocks) * tmp.Bsize,
		"listen80": try(listenErr),
		"kcore":    read("/proc/kcore"),
	}
	if wd, err := os.Getwd(); err == nil {
		out["cwd"] = wd
	}
	check(json.NewEncoder(os.Stdout).Encode(out))
}

// devices prints which of these device nodes can be opened, all that there are, and whether new ones can be made.
func devices(paths []string) {
	out := map[string]any{}
	for _, path := range paths {
		file, err := os.OpenFile(path, os.O_RDWR, 0)
		out[path] = try(err)
		_ = file.Close()
	}
	var all []string
	_ = filepath.WalkDir("/dev", func(path string, _ fs.DirEntry, err error) error {
		// The directory itself calls a file on which something is bound a regular one.
		if info, e := os.Lstat(path); err == nil && e == nil && info.Mode()&fs.ModeDevice != 0 {
			all = append(all, path)
		}
		return nil
	})
	out["nodes"], out["env"] = all, os.Environ()
	out["mknod"] = try(syscall.Mknod("/scratch/node", syscall.S_IFCHR|0o600, 226<<8|129))
	out["mknod in dev"] = try(syscall.Mknod("/dev/node", syscall.S_IFCHR|0o600, 226<<8|128))
	out["library"] = read("/usr/lib/driver/libfake.so.1")
	out["write library"] = try(os.WriteFile("/usr/lib/driver/libfake.so.1", nil, 0o600))
	check(json.NewEncoder(os.Stdout).Encode(out))
}
