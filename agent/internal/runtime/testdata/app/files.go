package main

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

// list prints each file below the roots in one line, then a last line.
func list(roots []string) {
	for _, root := range roots {
		check(filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			check(err)
			fmt.Println(describe(path, d))
			return nil
		}))
	}
	fmt.Println("listed")
}

func describe(path string, d fs.DirEntry) string {
	var st syscall.Stat_t
	check(syscall.Lstat(path, &st))
	line := fmt.Sprintf("%s mode=%o owner=%d:%d dev=%d", path, st.Mode, st.Uid, st.Gid, st.Rdev)
	if !d.IsDir() {
		line += fmt.Sprintf(" links=%d mtime=%d", st.Nlink, st.Mtim.Sec)
	}
	switch {
	case d.Type().IsRegular():
		data, err := os.ReadFile(path)
		check(err)
		line += fmt.Sprintf(" sum=%x", sha256.Sum256(data))
	case d.Type()&fs.ModeSymlink != 0:
		target, err := os.Readlink(path)
		check(err)
		return line + " to=" + target
	}
	names := make([]byte, 4<<10)
	n, err := syscall.Listxattr(path, names)
	if d.Type()&(fs.ModeDevice|fs.ModeNamedPipe) != 0 || errors.Is(err, syscall.ENOTSUP) {
		return line
	}
	check(err)
	all := strings.Split(strings.TrimSuffix(string(names[:n]), "\x00"), "\x00")
	slices.Sort(all)
	for _, name := range all {
		value := make([]byte, 4<<10)
		if n, err := syscall.Getxattr(path, name, value); err == nil {
			line += fmt.Sprintf(" %s=%q", name, value[:n])
		}
	}
	return line
}

// alter changes files of the image in each way that copies them up.
func alter() {
	at := time.Unix(1_600_000_000, 0)
	check(os.WriteFile("/kept/written", []byte("written"), 0o600))
	file, err := os.OpenFile("/kept/appended", os.O_APPEND|os.O_WRONLY, 0)
	check(err)
	_, err = file.WriteString(" and more")
	check(errors.Join(err, file.Close()))
	check(os.Chown("/kept/given", 42, 43))
	check(syscall.Chmod("/kept/given", 0o4711))
	check(os.Rename("/kept/moved", "/kept/dir/moved"))
	check(os.Remove("/kept/removed"))
	check(os.Link("/kept/linked", "/kept/link"))
	check(syscall.Setxattr("/kept/marked", "user.mark", []byte("here"), 0))
	check(os.RemoveAll("/kept/cleared"))
	check(os.Mkdir("/kept/cleared", 0o750))
	for _, name := range []string{"written", "appended"} {
		check(os.Chtimes("/kept/"+name, at, at))
	}
}
