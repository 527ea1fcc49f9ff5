package main

import (
	"archive/zip"
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"
)

// versionLine is the version in pyproject.toml.
var versionLine = regexp.MustCompile(`(?m)^version = "([^"]+)"$`)

// Wheel packs the package of a project directory, byte for byte the same each time (PEP 427).
func Wheel(dir string) (name string, wheel []byte, err error) {
	project, err := os.ReadFile(filepath.Join(dir, "pyproject.toml"))
	if err != nil {
		return "", nil, err
	}
	found := versionLine.FindSubmatch(project)
	if found == nil {
		return "", nil, errors.New("pyproject.toml has no version")
	}
	release := "gpuaas-" + string(found[1])
	readme, err := os.ReadFile(filepath.Join(dir, "README.md"))
	if err != nil {
		return "", nil, err
	}
	info := release + ".dist-info/"
	var out bytes.Buffer
	z := zip.NewWriter(&out)
	var record strings.Builder
	add := func(path string, content []byte) error {
		// The first moment that a zip file can name.
		w, err := z.CreateHeader(&zip.FileHeader{
			Name: path, Method: zip.Deflate, Modified: time.Date(1980, 1, 1, 0, 0, 0, 0, time.UTC),
		})
		if err == nil {
			_, err = w.Write(content)
		}
		sum := sha256.Sum256(content)
		fmt.Fprintf(&record, "%s,sha256=%s,%d\n", path, base64.RawURLEncoding.EncodeToString(sum[:]), len(content))
		return err
	}
	err = filepath.WalkDir(filepath.Join(dir, "gpuaas"), func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || filepath.Ext(path) == ".pyc" {
			return err
		}
		content, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		inside, err := filepath.Rel(dir, path)
		return errors.Join(err, add(filepath.ToSlash(inside), content))
	})
	metadata := "Metadata-Version: 2.1\nName: gpuaas\nVersion: " + string(found[1]) +
		"\nSummary: Client of the GPUaaS hub\nLicense: Apache-2.0\nRequires-Python: >=3.11\n" +
		"Provides-Extra: assertion\nRequires-Dist: cryptography>=38; extra == \"assertion\"\n" +
		"Description-Content-Type: text/markdown\n\n" + string(readme)
	err = errors.Join(err, add(info+"METADATA", []byte(metadata)),
		add(info+"WHEEL", []byte("Wheel-Version: 1.0\nGenerator: gpuaas\nRoot-Is-Purelib: true\nTag: py3-none-any\n")))
	record.WriteString(info + "RECORD,,\n")
	w, createErr := z.CreateHeader(&zip.FileHeader{
		Name: info + "RECORD", Method: zip.Deflate, Modified: time.Date(1980, 1, 1, 0, 0, 0, 0, time.UTC),
	})
	if createErr == nil {
		_, createErr = w.Write([]byte(record.String()))
	}
	err = errors.Join(err, createErr, z.Close())
	return release + "-py3-none-any.whl", out.Bytes(), err
}
