# A thin front of CMake. `make help` lists what there is.

PRESET ?=
BUILD ?= $(if $(PRESET),build-$(PRESET),build)
OCTET_CUDA ?= AUTO
JOBS ?= $(shell nproc)
PREFIX ?= /usr/local
TEXT ?=
MAKEFLAGS += --no-print-directory

CONFIGURE = cmake -S . $(if $(PRESET),--preset $(PRESET),-DOCTET_CUDA=$(OCTET_CUDA)) -B $(BUILD)
GENERATOR = $(if $(wildcard $(BUILD)/CMakeCache.txt),,$(if $(shell command -v ninja),-G Ninja))
SOURCES = $(shell find include src tests -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')

.PHONY: all build packages run test test-all bench install format lint clean help

all: build

packages:
	@bash cmake/install_packages.sh

build: packages
	@$(CONFIGURE) $(GENERATOR) -DCMAKE_INSTALL_PREFIX=$(PREFIX) --log-level=NOTICE
	@cmake --build $(BUILD) -j $(JOBS)

run: build
	@bash jobs/demo.sh $(BUILD)/octet $(TEXT)

test: build
	@bash tests/run.sh $(BUILD)

test-all: build
	@OCTET_ALL_LAYOUTS=1 bash tests/run.sh $(BUILD)

bench: build
	@bash jobs/node_bench.sh $(BUILD)/octet $(BUILD)/bench.json
	@bash jobs/bench.sh $(BUILD)/octet

install: build
	@cmake --install $(BUILD)

format:
	@clang-format -i $(SOURCES)

lint: build
	@bash tests/lint.sh $(BUILD)

clean:
	@rm -rf build build-cpu build-cuda build-debug

help:
	@echo 'make run [TEXT=my.txt]  install what is missing, build, and train a small model from text'
	@echo 'make test               build and run every test that this machine can run'
	@echo 'make test-all           the same with every layout of the matrix instead of a pairwise-covering part'
	@echo 'make build              build octet in $(BUILD)/'
	@echo 'make bench              measure this machine (octet bench), and where there are GPUs whole training runs'
	@echo 'make install [PREFIX=]  install octet, decks and job scripts'
	@echo 'make format, make lint  clang-format; clang-format, cppcheck and clang-tidy as checks'
	@echo 'Variables: PRESET=cpu|cuda|debug  OCTET_CUDA=AUTO|ON|OFF  BUILD=folder  JOBS=n'
